#ifndef GPU_EMULATOR_CUDA_PROC_ADDRESS_H
#define GPU_EMULATOR_CUDA_PROC_ADDRESS_H

#include "cuda_abi.h"

CUresult look_up_symbol(const char *name, void **out, int version, int *status);

#endif
