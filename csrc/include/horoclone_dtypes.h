/* The element types, in one list that everything reads: hc_dtype of the C API, DType of the core, the host's loops,
 * what plain tensors are recognised by. Users and ranks exchange the positions as integers: add at the end of a list.
 *
 * To add one that is only moved: a row of HC_MOVED_DTYPES, and its name at the same place of MOVED in horoclone/ops.py.
 * One that is reduced: a row of HC_REDUCED_DTYPES and of DTYPES in ops.py (the moved ones then have other numbers, and
 * HC_VERSION must rise); LaneOf in arithmetic/reduce_kernels.h where its elements are no C++ integers; a kernel in
 * device/kernels/kernels.cu; NCCL's number, which the compiler asks for. A framework that has a number of its own for
 * it: frameworks/jax_call.cc, frameworks/tensorflow_ops.cc. */
#pragma once

/* clang-format off */
/* X(hc_dtype, DType, name in Python, bytes, Kind, C++ type of an element, DLPack's kind, formats in Python's struct) */
#define HC_REDUCED_DTYPES(X)                                       \
  X(BOOL,     kBool, "bool",     1, kBool,    bool,     6, "?")    \
  X(UINT8,    kU8,   "uint8",    1, kInteger, uint8_t,  1, "B")    \
  X(INT8,     kI8,   "int8",     1, kInteger, int8_t,   0, "b")    \
  X(UINT16,   kU16,  "uint16",   2, kInteger, uint16_t, 1, "H")    \
  X(INT16,    kI16,  "int16",    2, kInteger, int16_t,  0, "h")    \
  X(INT32,    kI32,  "int32",    4, kInteger, int32_t,  0, "ilq")  \
  X(INT64,    kI64,  "int64",    8, kInteger, int64_t,  0, "ilq")  \
  X(FLOAT16,  kF16,  "float16",  2, kFloat,   Float16,  2, "e")    \
  X(BFLOAT16, kBF16, "bfloat16", 2, kFloat,   BFloat16, 4, "")     \
  X(FLOAT32,  kF32,  "float32",  4, kFloat,   float,    2, "f")    \
  X(FLOAT64,  kF64,  "float64",  8, kFloat,   double,   2, "d")

/* X(hc_dtype, name in Python, bytes). Moved and never reduced. Those of less than 8 bits have a byte each, but for
 * FLOAT4_E2M1FN_X2, a pair in a byte. */
#define HC_MOVED_DTYPES(X)                      \
  X(UINT32, "uint32", 4)                        \
  X(UINT64, "uint64", 8)                        \
  X(COMPLEX32, "complex32", 4)                  \
  X(COMPLEX64, "complex64", 8)                  \
  X(COMPLEX128, "complex128", 16)               \
  X(FLOAT8_E4M3FN, "float8_e4m3fn", 1)          \
  X(FLOAT8_E4M3FNUZ, "float8_e4m3fnuz", 1)      \
  X(FLOAT8_E5M2, "float8_e5m2", 1)              \
  X(FLOAT8_E5M2FNUZ, "float8_e5m2fnuz", 1)      \
  X(FLOAT8_E8M0FNU, "float8_e8m0fnu", 1)        \
  X(FLOAT8_E4M3, "float8_e4m3", 1)              \
  X(FLOAT8_E3M4, "float8_e3m4", 1)              \
  X(FLOAT8_E4M3B11FNUZ, "float8_e4m3b11fnuz", 1) \
  X(FLOAT6_E2M3FN, "float6_e2m3fn", 1)          \
  X(FLOAT6_E3M2FN, "float6_e3m2fn", 1)          \
  X(FLOAT4_E2M1FN, "float4_e2m1fn", 1)          \
  X(FLOAT4_E2M1FN_X2, "float4_e2m1fn_x2", 1)    \
  X(INT4, "int4", 1)                            \
  X(UINT4, "uint4", 1)                          \
  X(INT2, "int2", 1)                            \
  X(UINT2, "uint2", 1)
/* clang-format on */
