/* Apart from the table, which declares every function without its parameters. */
#include "proc_address.h"

CUDA_EXPORT(cuGetProcAddress_v2, const char *name, void **out, int version, uint64_t flags, int *status)
{
    (void)flags; /* per-thread default streams: the same functions */
    if (name == NULL || out == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    return look_up_symbol(name, out, version, status);
}

CUDA_EXPORT(cuGetProcAddress, const char *name, void **out, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(name, out, version, flags, NULL);
}
