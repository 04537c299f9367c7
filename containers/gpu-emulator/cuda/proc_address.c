/* cuGetProcAddress: the function with this name in the CUDA version for which the caller was built. */
#include "proc_address.h"

#include "core.h"

#include <stdlib.h>
#include <string.h>

/* name, CUDA version from which it is this function, function */
#define SYMBOLS \
    X(cuInit, 2000, cuInit) \
    X(cuDriverGetVersion, 2020, cuDriverGetVersion) \
    X(cuGetErrorName, 6000, cuGetErrorName) \
    X(cuGetErrorString, 6000, cuGetErrorString) \
    X(cuDeviceGet, 2000, cuDeviceGet) \
    X(cuDeviceGetCount, 2000, cuDeviceGetCount) \
    X(cuDeviceGetName, 2000, cuDeviceGetName) \
    X(cuDeviceGetUuid, 9020, cuDeviceGetUuid) \
    X(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2) \
    X(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2) \
    X(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute) \
    X(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId) \
    X(cuDeviceGetByPCIBusId, 4010, cuDeviceGetByPCIBusId) \
    X(cuDeviceComputeCapability, 2000, cuDeviceComputeCapability) \
    X(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer) \
    X(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain) \
    X(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2) \
    X(cuDevicePrimaryCtxSetFlags, 11000, cuDevicePrimaryCtxSetFlags_v2) \
    X(cuDevicePrimaryCtxReset, 11000, cuDevicePrimaryCtxReset_v2) \
    X(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState) \
    X(cuCtxCreate, 3020, cuCtxCreate_v2) \
    X(cuCtxCreate, 11040, cuCtxCreate_v3) \
    X(cuCtxCreate, 12050, cuCtxCreate_v4) \
    X(cuCtxDestroy, 4000, cuCtxDestroy_v2) \
    X(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2) \
    X(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2) \
    X(cuCtxSetCurrent, 4000, cuCtxSetCurrent) \
    X(cuCtxGetCurrent, 4000, cuCtxGetCurrent) \
    X(cuCtxGetDevice, 2000, cuCtxGetDevice) \
    X(cuCtxSynchronize, 2000, cuCtxSynchronize) \
    X(cuCtxGetApiVersion, 3020, cuCtxGetApiVersion) \
    X(cuCtxGetFlags, 7000, cuCtxGetFlags) \
    X(cuCtxGetId, 12000, cuCtxGetId) \
    X(cuCtxGetLimit, 3010, cuCtxGetLimit) \
    X(cuCtxSetLimit, 3010, cuCtxSetLimit) \
    X(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange) \
    X(cuPointerGetAttribute, 4000, cuPointerGetAttribute) \
    X(cuMemAlloc, 3020, cuMemAlloc_v2) \
    X(cuMemAllocAsync, 11020, cuMemAllocAsync) \
    X(cuMemAllocManaged, 6000, cuMemAllocManaged) \
    X(cuMemAllocPitch, 3020, cuMemAllocPitch_v2) \
    X(cuMemFree, 3020, cuMemFree_v2) \
    X(cuMemFreeAsync, 11020, cuMemFreeAsync) \
    X(cuMemGetInfo, 3020, cuMemGetInfo_v2) \
    X(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2) \
    X(cuMemHostAlloc, 2020, cuMemHostAlloc) \
    X(cuMemAllocHost, 3020, cuMemAllocHost_v2) \
    X(cuMemFreeHost, 2000, cuMemFreeHost) \
    X(cuMemHostRegister, 6050, cuMemHostRegister_v2) \
    X(cuMemHostUnregister, 4000, cuMemHostUnregister) \
    X(cuMemcpy, 4000, cuMemcpy) \
    X(cuMemcpyAsync, 4000, cuMemcpyAsync) \
    X(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2) \
    X(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2) \
    X(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2) \
    X(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2) \
    X(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2) \
    X(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2) \
    X(cuMemsetD8, 3020, cuMemsetD8_v2) \
    X(cuMemsetD16, 3020, cuMemsetD16_v2) \
    X(cuMemsetD32, 3020, cuMemsetD32_v2) \
    X(cuMemsetD8Async, 3020, cuMemsetD8Async) \
    X(cuMemsetD16Async, 3020, cuMemsetD16Async) \
    X(cuMemsetD32Async, 3020, cuMemsetD32Async) \
    X(cuStreamCreate, 2000, cuStreamCreate) \
    X(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority) \
    X(cuStreamDestroy, 4000, cuStreamDestroy_v2) \
    X(cuStreamSynchronize, 2000, cuStreamSynchronize) \
    X(cuStreamQuery, 2000, cuStreamQuery) \
    X(cuStreamWaitEvent, 3020, cuStreamWaitEvent) \
    X(cuEventCreate, 2000, cuEventCreate) \
    X(cuEventDestroy, 4000, cuEventDestroy_v2) \
    X(cuEventRecord, 2000, cuEventRecord) \
    X(cuEventSynchronize, 2000, cuEventSynchronize) \
    X(cuEventQuery, 2000, cuEventQuery) \
    X(cuEventElapsedTime, 2000, cuEventElapsedTime) \
    X(cuEventElapsedTime, 12080, cuEventElapsedTime_v2) \
    X(cuModuleLoad, 2000, cuModuleLoad) \
    X(cuModuleLoadData, 2000, cuModuleLoadData) \
    X(cuModuleLoadDataEx, 2010, cuModuleLoadDataEx) \
    X(cuModuleUnload, 2000, cuModuleUnload) \
    X(cuModuleGetFunction, 2000, cuModuleGetFunction) \
    X(cuLaunchKernel, 4000, cuLaunchKernel) \
    X(cuLaunchKernelEx, 11060, cuLaunchKernelEx) \
    X(cuGetProcAddress, 11030, cuGetProcAddress) \
    X(cuGetProcAddress, 12000, cuGetProcAddress_v2) \
    X(cuCheckpointProcessGetRestoreThreadId, 12080, cuCheckpointProcessGetRestoreThreadId) \
    X(cuCheckpointProcessGetState, 12080, cuCheckpointProcessGetState) \
    X(cuCheckpointProcessLock, 12080, cuCheckpointProcessLock) \
    X(cuCheckpointProcessCheckpoint, 12080, cuCheckpointProcessCheckpoint) \
    X(cuCheckpointProcessRestore, 12080, cuCheckpointProcessRestore) \
    X(cuCheckpointProcessUnlock, 12080, cuCheckpointProcessUnlock) \
    X(cuCheckpointOperationComplete, 13040, cuCheckpointOperationComplete)

#define CHECKPOINT_SINCE 12080
#define CHECKPOINT_DRIVER 570

/* Only their addresses are used here. */
#define X(name, version, function) void function(void);
SYMBOLS
#undef X

struct symbol {
    const char *name;
    int since;
    void (*function)(void);
};

static const struct symbol symbols[] = {
#define X(name, version, function) {#name, version, function},
    SYMBOLS
#undef X
};

static bool is_available(const struct symbol *symbol, const struct emu_state *state)
{
    if (state == NULL)
        return true;
    if (strncmp(symbol->name, "cuCheckpoint", strlen("cuCheckpoint")) == 0 &&
        strtol(state->driver_version, NULL, 10) < CHECKPOINT_DRIVER)
        return false;
    return symbol->since <= state->cuda_version;
}

CUresult look_up_symbol(const char *name, void **out, int version, int *status)
{
    struct emu_state *state = emu_attach();
    bool newer_than_driver = state != NULL && version > state->cuda_version;

    *out = NULL;
    *status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    for (size_t at = 0; at < sizeof(symbols) / sizeof(symbols[0]) && !newer_than_driver; at++) {
        if (strcmp(symbols[at].name, name) != 0 || !is_available(&symbols[at], state))
            continue;
        if (symbols[at].since <= version) {
            memcpy(out, &symbols[at].function, sizeof(*out));
            *status = CU_GET_PROC_ADDRESS_SUCCESS;
        } else if (*out == NULL) {
            *status = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
        }
    }
    if (state != NULL)
        emu_detach();
    return newer_than_driver ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
