// One call of a JAX program as XLA hands it over: its attributes and buffers, read into the words of horoclone.h.
// Thread: whichever of XLA's runs the program; a call belongs to one thread until it is submitted.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "frameworks/xla_ffi.h"
#include "horoclone.h"

namespace hc::jax {

// An operation of the handler's own, on the CPU: it tests what a real call needs of XLA.
constexpr int32_t kSelfTest = -1;
// Another: the program has come to a branch in one of whose arms the call is. Hands on its argument, the arm's number.
constexpr int32_t kVisit = -2;

// What the handler's attributes say (horoclone/jax/primitives.py writes them).
struct Attributes {
  int32_t op = 0, reduce = HC_SUM, root = 0;
  int64_t program = 0;  // which XLA program of this process; never compared between ranks
  double prescale = 1.0, postscale = 1.0;
  std::string_view name;
  std::string_view members;  // the process set as "0,2,3"; empty: everybody
};

// Text of what is wrong, empty when all is well.
std::string read(const xla::Attributes& from, Attributes* to);

struct Tensors {
  std::vector<hc_tensor> list;      // `out` is null where the core owns the result
  std::vector<size_t> bytes;        // of each result
  std::vector<void*> copies_to;     // XLA's memory for core-owned results
  std::vector<int64_t> first_rows;  // what the program was compiled for; -1 for results without dimensions
};
std::string read(const xla::CallFrame& frame, const Attributes& attributes, Tensors* to);
// The error of a result with other rows than the program was compiled for.
std::string other_rows(const std::string& name, size_t tensor, int64_t rows, int64_t compiled_for);

// Puts the hashes of all arguments, as hc_hash_memory makes them, into the one result: two words of 32 bits for
// each. Text of what is wrong, empty when all is well.
std::string hash_arguments(const xla::CallFrame& frame);

xla::Error* make_error(const xla::Api* api, xla::ErrorCode code, const std::string& text);
xla::ErrorCode code_of(hc_code code);
const char* name_of(hc_code code);  // the Python class that means the same

}  // namespace hc::jax
