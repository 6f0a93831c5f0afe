// TensorFlow's C kernel API as far as we use it, declared by ourselves: nothing of TensorFlow is needed to build. The
// functions are looked up in the libtensorflow_framework.so.2 that the process has loaded, when our library is loaded.
// Prototypes: tensorflow/c/{kernels,ops,tf_status,tf_tensor}.h, unchanged from TensorFlow 2.16 to 2.21.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

struct TF_Status;
struct TF_Tensor;
struct TF_OpDefinitionBuilder;
struct TF_ShapeHandle;
struct TF_ShapeInferenceContext;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;
struct TF_StringView {
  const char* data;
  size_t len;
};

namespace hc::tensorflow {

constexpr int kTfInt32 = 3;  // TF_DataType; the others are in tensorflow_ops.cc

// TF_Code
enum TfCode : int {
  kTfOk = 0,
  kTfUnknown = 2,
  kTfInvalidArgument = 3,
  kTfFailedPrecondition = 9,
  kTfUnimplemented = 12,
  kTfInternal = 13
};

using ShapeFunction = void (*)(TF_ShapeInferenceContext*, TF_Status*);
using CreateFunction = void* (*)(TF_OpKernelConstruction*);
using ComputeFunction = void (*)(void*, TF_OpKernelContext*);
using AsyncComputeFunction = void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
using DeleteFunction = void (*)(void*);

// X(result, name without TF_, parameters)
#define HC_TENSORFLOW_FUNCTIONS(X)                                                                                  \
  X(TF_Status*, NewStatus, ())                                                                                      \
  X(void, DeleteStatus, (TF_Status*))                                                                               \
  X(void, SetStatus, (TF_Status*, int code, const char* text))                                                      \
  X(int, GetCode, (const TF_Status*))                                                                               \
  X(const char*, Message, (const TF_Status*))                                                                       \
  X(TF_OpDefinitionBuilder*, NewOpDefinitionBuilder, (const char* op))                                              \
  X(void, OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char*))                                       \
  X(void, OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char*))                                      \
  X(void, OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char*))                                     \
  X(void, OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool))                                        \
  X(void, OpDefinitionBuilderSetShapeInferenceFunction, (TF_OpDefinitionBuilder*, ShapeFunction))                   \
  X(void, RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*))                                              \
  X(int64_t, ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext*))                                           \
  X(void, ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext*, TF_Status*))                            \
  X(TF_ShapeHandle*, NewShapeHandle, ())                                                                            \
  X(void, DeleteShapeHandle, (TF_ShapeHandle*))                                                                     \
  X(void, ShapeInferenceContextGetInput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))             \
  X(void, ShapeInferenceContextSetOutput, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))            \
  X(TF_ShapeHandle*, ShapeInferenceContextScalar, (TF_ShapeInferenceContext*))                                      \
  X(TF_ShapeHandle*, ShapeInferenceContextVectorFromSize, (TF_ShapeInferenceContext*, size_t))                      \
  X(int64_t, ShapeInferenceContextRank, (TF_ShapeInferenceContext*, TF_ShapeHandle*))                               \
  X(int, ShapeInferenceContextRankKnown, (TF_ShapeInferenceContext*, TF_ShapeHandle*))                              \
  X(void, ShapeInferenceContextSubshape,                                                                            \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t start, int64_t end, TF_ShapeHandle*, TF_Status*))          \
  X(void, ShapeInferenceContextConcatenateShapes,                                                                   \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*))                     \
  X(TF_KernelBuilder*, NewKernelBuilder,                                                                            \
    (const char* op, const char* device, CreateFunction, ComputeFunction, DeleteFunction))                          \
  X(TF_KernelBuilder*, NewAsyncKernelBuilder,                                                                       \
    (const char* op, const char* device, CreateFunction, AsyncComputeFunction, DeleteFunction))                     \
  X(void, KernelBuilder_HostMemory, (TF_KernelBuilder*, const char* argument))                                      \
  X(void, RegisterKernelBuilder, (const char* name, TF_KernelBuilder*, TF_Status*))                                 \
  X(TF_StringView, OpKernelConstruction_GetName, (TF_OpKernelConstruction*))                                        \
  X(void, OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))                                     \
  X(void, OpKernelConstruction_GetAttrSize,                                                                         \
    (TF_OpKernelConstruction*, const char*, int32_t* list_size, int32_t* total_size, TF_Status*))                   \
  X(void, OpKernelConstruction_GetAttrInt32, (TF_OpKernelConstruction*, const char*, int32_t*, TF_Status*))         \
  X(void, OpKernelConstruction_GetAttrBool, (TF_OpKernelConstruction*, const char*, unsigned char*, TF_Status*))    \
  X(void, OpKernelConstruction_GetAttrString, (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*))   \
  X(int, NumInputs, (TF_OpKernelContext*))                                                                          \
  X(void, GetInput, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                                            \
  X(void, SetOutput, (TF_OpKernelContext*, int, const TF_Tensor*, TF_Status*))                                      \
  X(void, OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))                                               \
  X(uint64_t, GetFrameId, (TF_OpKernelContext*))                                                                    \
  X(int64_t, GetIterId, (TF_OpKernelContext*))                                                                      \
  X(TF_Tensor*, AllocateOutput,                                                                                     \
    (TF_OpKernelContext*, int index, int type, const int64_t* dims, int num_dims, size_t bytes, TF_Status*))        \
  X(TF_Tensor*, ForwardInputOrAllocateOutput,                                                                       \
    (TF_OpKernelContext*, const int* candidates, int num_candidates, int output, const int64_t* dims, int num_dims, \
     int* forwarded, TF_Status*))                                                                                   \
  X(TF_Tensor*, NewTensor,                                                                                          \
    (int type, const int64_t* dims, int num_dims, void* data, size_t bytes, void (*)(void*, size_t, void*), void*)) \
  X(void, DeleteTensor, (TF_Tensor*))                                                                               \
  X(int, TensorType, (const TF_Tensor*))                                                                            \
  X(int, NumDims, (const TF_Tensor*))                                                                               \
  X(int64_t, Dim, (const TF_Tensor*, int))                                                                          \
  X(void*, TensorData, (const TF_Tensor*))                                                                          \
  X(void, RunAsyncOpKernelDoneCallback, (TF_AsyncOpKernelDoneCallback*))

struct Api {
#define HC_TENSORFLOW_MEMBER(result, name, parameters) result(*name) parameters = nullptr;
  HC_TENSORFLOW_FUNCTIONS(HC_TENSORFLOW_MEMBER)
#undef HC_TENSORFLOW_MEMBER
};

extern Api api;  // filled once, when the library is loaded

// Fills `api` and checks what the work-round for the done callback relies on. Empty when all is well, else what is
// wrong.
std::string load_api();

// An asynchronous kernel gets its done callback as a pointer to a std::function<void()> on the caller's stack, which is
// gone when the kernel returns (so in 2.16 to 2.21, tensorflow/c/kernels.cc): copy the function while it lives.
using Done = std::function<void()>;
// False when what is there does not look like a std::function of libstdc++; then `out` stays as it is.
bool copy_done(TF_AsyncOpKernelDoneCallback* done, Done* out);

// A TF_Status that frees itself.
class Outcome {
 public:
  Outcome() : status_(api.NewStatus()) {}
  ~Outcome() { api.DeleteStatus(status_); }
  Outcome(const Outcome&) = delete;
  Outcome& operator=(const Outcome&) = delete;
  operator TF_Status*() const { return status_; }
  bool ok() const { return api.GetCode(status_) == kTfOk; }
  std::string text() const { return api.Message(status_); }
  void set(TfCode code, const std::string& text) { api.SetStatus(status_, code, text.c_str()); }

 private:
  TF_Status* status_;
};

}  // namespace hc::tensorflow
