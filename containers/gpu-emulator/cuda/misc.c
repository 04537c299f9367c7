/* Minor functions that libraries call. */
#include "internal.h"

#define API_VERSION 3020
#define LIMITS 8

static size_t limits[LIMITS] = {1024, 1048576, 8388608, 2, 2048, 128, 0, 0};

CUDA_EXPORT(cuCtxGetApiVersion, CUcontext context, unsigned *version)
{
    (void)context;
    if (version == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    *version = API_VERSION;
    return CUDA_SUCCESS;
}

CUDA_EXPORT(cuCtxGetFlags, unsigned *flags)
{
    CUcontext context;
    CUresult rc = flags == NULL ? CUDA_ERROR_INVALID_VALUE : enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    *flags = context->flags;
    leave();
    return CUDA_SUCCESS;
}

CUDA_EXPORT(cuCtxGetId, CUcontext wanted, unsigned long long *id)
{
    CUcontext context;
    CUresult rc = id == NULL ? CUDA_ERROR_INVALID_VALUE : enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&cuda.mutex);
    if (wanted != NULL && !context_exists(wanted))
        rc = CUDA_ERROR_INVALID_CONTEXT;
    else
        *id = wanted == NULL ? context->id : wanted->id;
    pthread_mutex_unlock(&cuda.mutex);
    leave();
    return rc;
}

CUDA_EXPORT(cuCtxGetLimit, size_t *value, int limit)
{
    if (value == NULL || limit < 0 || limit >= LIMITS)
        return CUDA_ERROR_INVALID_VALUE;
    *value = limits[limit];
    return CUDA_SUCCESS;
}

CUDA_EXPORT(cuCtxSetLimit, int limit, size_t value)
{
    if (limit < 0 || limit >= LIMITS)
        return CUDA_ERROR_INVALID_VALUE;
    limits[limit] = value;
    return CUDA_SUCCESS;
}

CUDA_EXPORT(cuCtxGetStreamPriorityRange, int *least, int *greatest)
{
    if (least != NULL)
        *least = 0;
    if (greatest != NULL)
        *greatest = -5;
    return CUDA_SUCCESS;
}

enum { POINTER_CONTEXT = 1, POINTER_MEMORY_TYPE = 2, POINTER_DEVICE = 3, POINTER_HOST = 4, POINTER_MANAGED = 8, POINTER_ORDINAL = 9,
       POINTER_START = 11, POINTER_SIZE = 12 };
enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2 };

static CUresult pointer_attribute(const struct allocation *allocation, CUdeviceptr at, void *out, int attribute)
{
    switch (attribute) {
    case POINTER_CONTEXT:
        *(CUcontext *)out = allocation->context;
        return CUDA_SUCCESS;
    case POINTER_MEMORY_TYPE:
        *(unsigned *)out = MEMORY_DEVICE;
        return CUDA_SUCCESS;
    case POINTER_DEVICE:
        *(CUdeviceptr *)out = at;
        return CUDA_SUCCESS;
    case POINTER_MANAGED:
        *(unsigned *)out = allocation->managed;
        return CUDA_SUCCESS;
    case POINTER_ORDINAL:
        *(int *)out = (int)allocation->context->ordinal;
        return CUDA_SUCCESS;
    case POINTER_START:
        *(CUdeviceptr *)out = allocation->at;
        return CUDA_SUCCESS;
    case POINTER_SIZE:
        *(size_t *)out = allocation->size;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CUDA_EXPORT(cuPointerGetAttribute, void *out, int attribute, CUdeviceptr at)
{
    const struct allocation *allocation;
    CUcontext context;
    CUresult rc = out == NULL ? CUDA_ERROR_INVALID_VALUE : enter_context(&context);

    if (rc != CUDA_SUCCESS)
        return rc;
    pthread_mutex_lock(&cuda.mutex);
    allocation = allocation_at(at);
    rc = allocation == NULL ? CUDA_ERROR_INVALID_VALUE : pointer_attribute(allocation, at, out, attribute);
    pthread_mutex_unlock(&cuda.mutex);
    leave();
    return rc;
}
