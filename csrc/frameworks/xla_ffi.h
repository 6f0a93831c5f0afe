// The part of XLA's foreign-function C ABI that the JAX handlers use, declared here so that no jaxlib is needed to
// build. The facts are those of version 0.3 of the interface (jaxlib's xla/ffi/api/c_api.h); tests/jax/test_abi.py
// compiles both and compares every offset. Structs begin with the size that their writer knew: what lies beyond it does
// not exist. Within one major version members are only added at the end, so older and newer runtimes of major 0 share
// this part.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hc::xla {

constexpr int kApiMajor = 0, kApiMinor = 3;

struct Extension {  // XLA_FFI_Extension_Base
  size_t struct_size;
  int32_t type;  // kMetadataExtension
  Extension* next;
};
constexpr int32_t kMetadataExtension = 1;

struct ApiVersion {  // XLA_FFI_Api_Version
  size_t struct_size;
  Extension* extension_start;
  int major_version, minor_version;
};

struct Error;             // XLA_FFI_Error: made by us, owned by XLA as soon as it is handed over
struct Future;            // XLA_FFI_Future
struct ExecutionContext;  // XLA_FFI_ExecutionContext

enum class ErrorCode : int32_t {  // XLA_FFI_Error_Code: those of absl::Status
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kFailedPrecondition = 9,
  kAborted = 10,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
};

enum class DataType : int32_t {  // XLA_FFI_DataType
  kPred = 1,
  kS8 = 2,
  kS16 = 3,
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kU16 = 7,
  kU32 = 8,
  kU64 = 9,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kC64 = 15,
  kBF16 = 16,
  kC128 = 18,
  kF8E5M2 = 19,
  kF8E4M3FN = 20,
  kF8E4M3B11FNUZ = 23,
  kF8E5M2FNUZ = 24,
  kF8E4M3FNUZ = 25,
  kF8E4M3 = 28,
  kF8E3M4 = 29,
  kF8E8M0FNU = 33,
};

struct Buffer {  // XLA_FFI_Buffer
  size_t struct_size;
  Extension* extension_start;
  DataType dtype;
  void* data;
  int64_t rank;
  int64_t* dims;  // rank entries
};
constexpr int32_t kBufferArgument = 1;  // XLA_FFI_ArgType_BUFFER, XLA_FFI_RetType_BUFFER

struct ByteSpan {  // XLA_FFI_ByteSpan: not NUL-terminated
  const char* data;
  size_t size;
};
struct Scalar {  // XLA_FFI_Scalar
  DataType dtype;
  void* value;
};
enum class AttributeType : int32_t { kArray = 1, kDictionary = 2, kScalar = 3, kString = 4 };

struct Arguments {  // XLA_FFI_Args and XLA_FFI_Rets
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  int32_t* types;
  void** values;
};
struct Attributes {  // XLA_FFI_Attrs, sorted by name
  size_t struct_size;
  Extension* extension_start;
  int64_t size;
  AttributeType* types;
  ByteSpan** names;
  void** values;
};

enum class Stage : int32_t { kInstantiate = 0, kPrepare = 1, kInitialize = 2, kExecute = 3 };

struct Api;
struct CallFrame {  // XLA_FFI_CallFrame
  size_t struct_size;
  Extension* extension_start;
  const Api* api;
  ExecutionContext* context;
  Stage stage;
  Arguments arguments;
  Arguments results;
  Attributes attributes;
  Future* future;  // out; struct_size does not count it. Set: arguments and results live until it is completed.
};

struct ErrorCreateArgs {
  size_t struct_size;
  Extension* extension_start;
  const char* message;  // copied
  ErrorCode code;
};
struct ErrorMessageArgs {
  size_t struct_size;
  Extension* extension_start;
  Error* error;
  const char* message;  // out
};
struct ErrorDestroyArgs {
  size_t struct_size;
  Extension* extension_start;
  Error* error;
};
struct FutureCreateArgs {
  size_t struct_size;
  Extension* extension_start;
  Future* future;  // out; struct_size does not count it
};
struct FutureArgs {
  size_t struct_size;
  Extension* extension_start;
  Future* future;
};
struct FutureErrorArgs {
  size_t struct_size;
  Extension* extension_start;
  Future* future;
  Error* error;
};
struct TypeId {
  int64_t type_id;
};
struct StateSetArgs {
  size_t struct_size;
  Extension* extension_start;
  ExecutionContext* context;
  Stage stage;
  TypeId* type_id;
  void* state;
};
struct StateGetArgs {
  size_t struct_size;
  Extension* extension_start;
  ExecutionContext* context;
  Stage stage;
  TypeId* type_id;
  void* state;  // out
};
struct TypeInfo {  // XLA_FFI_TypeInfo
  size_t struct_size;
  Extension* extension_start;
  void (*deleter)(void* object);
};
struct TypeRegisterArgs {
  size_t struct_size;
  Extension* extension_start;
  ByteSpan name;
  TypeId* type_id;  // in-out
  const TypeInfo* type_info;
};
struct StreamGetArgs {
  size_t struct_size;
  Extension* extension_start;
  ExecutionContext* context;
  void* stream;  // out: a CUstream, in programs for NVIDIA's GPUs
};
struct RunIdGetArgs {
  size_t struct_size;
  Extension* extension_start;
  ExecutionContext* context;
  int64_t run_id;  // out
};
struct DeviceOrdinalGetArgs {
  size_t struct_size;
  Extension* extension_start;
  ExecutionContext* context;
  int32_t device_ordinal;  // out: as CUDA numbers devices in this process
};
constexpr size_t kDeviceOrdinalGetArgsSize =
    offsetof(DeviceOrdinalGetArgs, device_ordinal) + sizeof(DeviceOrdinalGetArgs::device_ordinal);

struct Metadata {  // XLA_FFI_Metadata
  size_t struct_size;
  ApiVersion api_version;
  uint32_t traits;
  TypeId state_type_id;
};
struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Api {  // XLA_FFI_Api
  size_t struct_size;
  Extension* extension_start;
  ApiVersion version;
  const void* internal_api;
  Error* (*error_create)(ErrorCreateArgs*);
  void (*error_message)(ErrorMessageArgs*);
  void (*error_destroy)(ErrorDestroyArgs*);
  void* handler_register;
  Error* (*stream_get)(StreamGetArgs*);
  Error* (*type_register)(TypeRegisterArgs*);
  void* execution_context_get;
  Error* (*state_set)(StateSetArgs*);
  Error* (*state_get)(StateGetArgs*);
  void* device_memory_allocate;
  void* device_memory_free;
  void* thread_pool_schedule;
  void* thread_pool_num_threads;
  Error* (*future_create)(FutureCreateArgs*);
  Error* (*future_set_available)(FutureArgs*);
  Error* (*future_set_error)(FutureErrorArgs*);
  Error* (*run_id_get)(RunIdGetArgs*);
  Error* (*device_ordinal_get)(DeviceOrdinalGetArgs*);  // not in the first releases of version 0.3
};

}  // namespace hc::xla
