/* In a file of its own, as the table declares every function without its parameters. */
#include "proc_address.h"

/* A missing function is not an error: the pointer is NULL, and the status contains the reason. */
CUDA_EXPORT(cuGetProcAddress_v2, const char *name, void **out, int version, uint64_t flags, int *status)
{
    int unwanted;

    (void)flags; /* per-thread default streams: the same functions */
    if (name == NULL || out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return look_up_symbol(name, out, version, status == NULL ? &unwanted : status);
}

CUDA_EXPORT(cuGetProcAddress, const char *name, void **out, int version, uint64_t flags)
{
    CUresult rc = cuGetProcAddress_v2(name, out, version, flags, NULL);

    return rc == CUDA_SUCCESS && *out == NULL ? CUDA_ERROR_NOT_FOUND : rc;
}
