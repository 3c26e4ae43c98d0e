// The macros of CUDA's public headers, for a host compiler: a wheel of the runtime lacks this one
// file.
#pragma once

#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDART_CB
#define __host__
#define __device__
#define __global__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __no_sanitize_thread__
#define __specialization_static static
#define __annotate__(each) __attribute__((each))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
