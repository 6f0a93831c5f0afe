// What nccl.h takes from CUDA's runtime, whose own headers want the compiler's package besides.
#pragma once
#include <stddef.h>
#define CUDART_VERSION 12000
#define __CUDA_BF16_TYPES_EXIST__ 1
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
