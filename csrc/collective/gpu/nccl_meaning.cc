#include "collective/gpu/nccl_meaning.h"

#include "collective/gpu/device_state.h"

namespace hc {

int nccl_type(DType dtype) {
  switch (dtype) {
    case DType::kBool:
    case DType::kU8:
      return kNcclU8;
    case DType::kI8:
      return kNcclI8;
    case DType::kI32:
      return kNcclI32;
    case DType::kI64:
      return kNcclI64;
    case DType::kF16:
      return kNcclF16;
    case DType::kBF16:
      return kNcclBF16;
    case DType::kF32:
      return kNcclF32;
    case DType::kF64:
      return kNcclF64;
    case DType::kU16:
    case DType::kI16:
      break;
  }
  return -1;
}

int nccl_op(DType dtype, Reduce reduce) {
  const bool is_bool = dtype == DType::kBool;
  switch (reduce) {
    case Reduce::kAverage:
    case Reduce::kSum:
      return is_bool ? kNcclMax : kNcclSum;
    case Reduce::kMin:
      return kNcclMin;
    case Reduce::kMax:
      return kNcclMax;
    case Reduce::kProduct:
      return is_bool ? kNcclMin : kNcclProduct;
    case Reduce::kAnd:
      return is_bool ? kNcclMin : -1;
    case Reduce::kOr:
      return is_bool ? kNcclMax : -1;
    case Reduce::kXor:
    case Reduce::kAdasum:
      break;
  }
  return -1;
}

bool nccl_does_alone(const Task& task) {
  if (nccl_type(task.dtype) < 0) return false;
  if (task.dtype == DType::kBool) return true;
  if (!is_float(task.dtype)) return task.scale.is_unit();  // our integer average truncates toward zero in int64
  return task.reduce == Reduce::kSum || task.scale.is_unit();
}

DType wire_type(const Task& task) {
  if (task.dtype == DType::kF16 || task.dtype == DType::kBF16) return DType::kF32;
  if (is_float(task.dtype)) return task.dtype;
  return size_of(task.dtype) == 2 ? DType::kI32 : task.dtype;
}

bool nccl_does(const Task& task, bool with_kernels) {
  if (!reduces(task.op)) return true;
  if (task.reduce == Reduce::kAdasum) return with_kernels && is_float(task.dtype);  // device_adasum.cc
  if (nccl_op(task.dtype, task.reduce) < 0) return false;
  return with_kernels || nccl_does_alone(task);
}

}  // namespace hc
