// Reading a call frame: see jax_call.h. Nothing here submits or waits.
#include "frameworks/jax_call.h"

#include <cstring>

#include "horoclone_tools.h"

namespace hc::jax {
namespace {

using xla::DataType;

bool core_owns_result(int32_t op) { return op == HC_ALLGATHER || op == HC_ALLTOALL || op == HC_REDUCESCATTER; }

template <class T>
void copy_scalar(const void* attribute, T* to) {
  std::memcpy(to, static_cast<const xla::Scalar*>(attribute)->value, sizeof *to);
}

// The core's number; -1: it has none.
int32_t dtype_of(DataType dtype) {
  switch (dtype) {
    case DataType::kPred:
      return HC_BOOL;
    case DataType::kU8:
      return HC_UINT8;
    case DataType::kS8:
      return HC_INT8;
    case DataType::kU16:
      return HC_UINT16;
    case DataType::kS16:
      return HC_INT16;
    case DataType::kS32:
      return HC_INT32;
    case DataType::kS64:
      return HC_INT64;
    case DataType::kF16:
      return HC_FLOAT16;
    case DataType::kBF16:
      return HC_BFLOAT16;
    case DataType::kF32:
      return HC_FLOAT32;
    case DataType::kF64:
      return HC_FLOAT64;
    case DataType::kU32:
      return HC_UINT32;
    case DataType::kU64:
      return HC_UINT64;
    case DataType::kC64:
      return HC_COMPLEX64;
    case DataType::kC128:
      return HC_COMPLEX128;
    case DataType::kF8E5M2:
      return HC_FLOAT8_E5M2;
    case DataType::kF8E4M3FN:
      return HC_FLOAT8_E4M3FN;
    case DataType::kF8E4M3B11FNUZ:
      return HC_FLOAT8_E4M3B11FNUZ;
    case DataType::kF8E5M2FNUZ:
      return HC_FLOAT8_E5M2FNUZ;
    case DataType::kF8E4M3FNUZ:
      return HC_FLOAT8_E4M3FNUZ;
    case DataType::kF8E4M3:
      return HC_FLOAT8_E4M3;
    case DataType::kF8E3M4:
      return HC_FLOAT8_E3M4;
    case DataType::kF8E8M0FNU:
      return HC_FLOAT8_E8M0FNU;
  }
  return -1;
}

size_t bytes_of(const xla::Buffer& buffer, int32_t dtype) {
#define HC_REDUCED(name, enumerator, text, bytes, ...) bytes,
#define HC_MOVED(name, text, bytes) bytes,
  constexpr size_t kBytes[] = {HC_REDUCED_DTYPES(HC_REDUCED) HC_MOVED_DTYPES(HC_MOVED)};
#undef HC_REDUCED
#undef HC_MOVED
  size_t bytes = kBytes[dtype];
  for (int64_t i = 0; i < buffer.rank; ++i) bytes *= static_cast<size_t>(buffer.dims[i]);
  return bytes;
}

}  // namespace

std::string read(const xla::Attributes& from, Attributes* to) {
  int found = 0;
  for (int64_t i = 0; i < from.size; ++i) {
    const std::string_view name(from.names[i]->data, from.names[i]->size);
    const bool is_text = name == "name" || name == "members";
    if (from.types[i] != (is_text ? xla::AttributeType::kString : xla::AttributeType::kScalar))
      return "attribute '" + std::string(name) + "' has an unexpected type";
    const void* value = from.values[i];
    const auto text = [&] {
      const auto* span = static_cast<const xla::ByteSpan*>(value);
      return std::string_view(span->data, span->size);
    };
    ++found;
    if (name == "op")
      copy_scalar(value, &to->op);
    else if (name == "reduce")
      copy_scalar(value, &to->reduce);
    else if (name == "root")
      copy_scalar(value, &to->root);
    else if (name == "program")
      copy_scalar(value, &to->program);
    else if (name == "prescale")
      copy_scalar(value, &to->prescale);
    else if (name == "postscale")
      copy_scalar(value, &to->postscale);
    else if (name == "name")
      to->name = text();
    else if (name == "members")
      to->members = text();
    else
      --found;  // from a newer horoclone: not ours to judge
  }
  return found == 8 ? "" : "the call has not all of its attributes; was the program made by another horoclone?";
}

std::string read(const xla::CallFrame& frame, const Attributes& attributes, Tensors* to) {
  const int64_t n = frame.arguments.size;
  if (frame.results.size != n) return "a call with " + std::to_string(n) + " arguments and another number of results";
  const bool owned = core_owns_result(attributes.op);
  for (int64_t i = 0; i < n; ++i) {
    if (frame.arguments.types[i] != xla::kBufferArgument || frame.results.types[i] != xla::kBufferArgument)
      return "argument " + std::to_string(i) + " is not a buffer";
    const auto& in = *static_cast<const xla::Buffer*>(frame.arguments.values[i]);
    const auto& out = *static_cast<const xla::Buffer*>(frame.results.values[i]);
    const int32_t dtype = dtype_of(in.dtype);
    if (dtype < 0 || out.dtype != in.dtype)
      return "tensor " + std::to_string(i) + " has XLA's dtype " + std::to_string(static_cast<int32_t>(in.dtype)) +
             ", which this operation does not take";
    if (!owned && bytes_of(in, dtype) != bytes_of(out, dtype)) return "a result of another size than its argument";
    to->list.push_back({in.data, owned ? nullptr : out.data, in.dims, static_cast<int32_t>(in.rank), dtype});
    to->bytes.push_back(bytes_of(out, dtype));
    if (!owned) continue;
    to->copies_to.push_back(out.data);
    to->first_rows.push_back(out.rank ? out.dims[0] : -1);
  }
  return "";
}

std::string other_rows(const std::string& name, size_t tensor, int64_t rows, int64_t compiled_for) {
  return "'" + name + "': tensor " + std::to_string(tensor) + " came out with " + std::to_string(rows) +
         " rows, and the program was compiled for " + std::to_string(compiled_for) +
         ". Under jit every rank gives the same number of rows, and a program serves the number of ranks that it was "
         "traced with (jax.clear_caches() after it has changed); the eager call takes any numbers.";
}

std::string hash_arguments(const xla::CallFrame& frame) {
  const int64_t n = frame.arguments.size;
  if (frame.results.size != 1) return "hashes with another number of results than one";
  const auto& out = *static_cast<const xla::Buffer*>(frame.results.values[0]);
  if (out.dtype != DataType::kU32 || out.rank != 2 || out.dims[0] != n || out.dims[1] != 2)
    return "hashes of " + std::to_string(n) + " arguments into a result of another shape";
  std::vector<const void*> data;
  std::vector<int64_t> bytes;
  for (int64_t i = 0; i < n; ++i) {
    const auto& in = *static_cast<const xla::Buffer*>(frame.arguments.values[i]);
    const int32_t dtype = dtype_of(in.dtype);
    if (dtype < 0) return "no hash of XLA's dtype " + std::to_string(static_cast<int32_t>(in.dtype));
    data.push_back(in.data);
    bytes.push_back(static_cast<int64_t>(bytes_of(in, dtype)));
  }
  std::vector<uint64_t> hashes(data.size());
  hc_hash_memory(data.data(), bytes.data(), static_cast<int32_t>(n), hashes.data());
  if (n > 0) std::memcpy(out.data, hashes.data(), hashes.size() * sizeof hashes[0]);
  return "";
}

xla::Error* make_error(const xla::Api* api, xla::ErrorCode code, const std::string& text) {
  xla::ErrorCreateArgs args{sizeof args, nullptr, text.c_str(), code};
  return api->error_create(&args);
}

xla::ErrorCode code_of(hc_code code) {
  switch (code) {
    case HC_NOT_INITIALIZED:
      return xla::ErrorCode::kFailedPrecondition;
    case HC_INVALID_ARGUMENT:
    case HC_MISMATCH:
      return xla::ErrorCode::kInvalidArgument;
    case HC_PEER_LOST:
      return xla::ErrorCode::kUnavailable;
    case HC_TIMEOUT:
      return xla::ErrorCode::kDeadlineExceeded;
    case HC_ABORTED:
      return xla::ErrorCode::kAborted;
    case HC_UNSUPPORTED:
      return xla::ErrorCode::kUnimplemented;
    case HC_OK:
    case HC_INTERNAL:
      break;
  }
  return xla::ErrorCode::kInternal;
}

const char* name_of(hc_code code) {
  static const char* const names[] = {"",         "NotInitialized", "ValueError",
                                      "Mismatch", "PeerLost",       "Timeout",
                                      "Aborted",  "Unsupported",    "HorovodInternalError"};
  return code >= HC_OK && code <= HC_INTERNAL ? names[code] : names[HC_INTERNAL];
}

}  // namespace hc::jax
