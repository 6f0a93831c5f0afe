// The kernels. A collective is submitted and the kernel returns; hc-notify finishes the op. No thread of TensorFlow
// waits.
//
// Thread: create and compute on TensorFlow's threads, finish on hc-notify. A Call belongs to whoever runs it last.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "tensorflow_ops.h"
#include "tensorflow_runtime.h"

namespace hc::tensorflow {

namespace {

// Names that one op in a loop has by turns. TensorFlow's loops have 10 iterations under way unless told otherwise.
constexpr int64_t kIterationsAtOnce = 64;
constexpr const char* kNotInitialized = "Horovod has not been initialized; use hvd.init().";

// What the attributes of one node say.
struct Kernel {
  const OpSpec* spec;
  std::string name;  // empty: the guard may have one, else matched by order
  int32_t reduce = HC_SUM, root = 0, process_set = 0;
  double prescale = 1, postscale = 1;
};

// Never Aborted or Unavailable: MonitoredTrainingSession takes these for a preemption and starts over without end.
TfCode code_of(hc_code code) {
  switch (code) {
    case HC_NOT_INITIALIZED:
    case HC_MISMATCH:
    case HC_UNSUPPORTED:
      return kTfFailedPrecondition;
    case HC_INVALID_ARGUMENT:
      return kTfInvalidArgument;
    case HC_OK:
    case HC_PEER_LOST:
    case HC_TIMEOUT:
    case HC_ABORTED:
    case HC_INTERNAL:
      break;
  }
  return kTfUnknown;
}

struct Tensor {
  const void* in = nullptr;
  void* out = nullptr;  // null: the core owns the result
  std::vector<int64_t> shape;
  int type = 0;
};

// One run of a kernel, from compute to done.
struct Call {
  const OpSpec* spec;
  TF_OpKernelContext* ctx;
  Done done;
  hc_runtime* runtime = nullptr;
  std::vector<Tensor> tensors;
  std::vector<int64_t> splits;  // empty: equal shares
  // Of an op that is run eagerly: its name (empty: matched by order) and factors. In a loop: the node's, and which
  // iteration it is.
  std::string name;
  double prescale = 1, postscale = 1;

  void fail(TfCode code, const std::string& text) {
    Outcome outcome;
    outcome.set(code, text);
    api.OpKernelContext_Failure(ctx, outcome);
  }
  bool read_inputs(Outcome* outcome);
  bool read_splits(Outcome* outcome);
  bool read_guard(Outcome* outcome);
  bool allocate_outputs(Outcome* outcome);
  bool take_results(hc_handle handle, Outcome* outcome);
  bool take_result(hc_handle handle, int i, Outcome* outcome);
  bool give_numbers(int output, const int32_t* numbers, int64_t count, Outcome* outcome);
};

// The context keeps the inputs alive until done; our references are dropped at once, so that an input that nobody else
// needs can become the output.
bool Call::read_inputs(Outcome* outcome) {
  if (spec->op == HC_JOIN) return true;
  const int n = api.NumInputs(ctx) - (spec->op == HC_ALLTOALL ? 2 : 1);  // splits and guard come last
  tensors.resize(n);
  for (int i = 0; i < n; ++i) {
    TF_Tensor* input = nullptr;
    api.GetInput(ctx, i, &input, *outcome);
    if (!outcome->ok()) return false;
    Tensor& t = tensors[i];
    t.in = api.TensorData(input);
    t.type = api.TensorType(input);
    for (int d = 0; d < api.NumDims(input); ++d) t.shape.push_back(api.Dim(input, d));
    api.DeleteTensor(input);
  }
  return read_guard(outcome) && (spec->op != HC_ALLTOALL || read_splits(outcome));
}

// Names and factors are not attributes where ops are run eagerly: TensorFlow keeps a kernel for each value of an
// attribute, for good. The guard has them: the number of the name's bytes, these, and two doubles if they are not 1.
bool Call::read_guard(Outcome* outcome) {
  TF_Tensor* guard = nullptr;
  api.GetInput(ctx, api.NumInputs(ctx) - 1, &guard, *outcome);
  if (!outcome->ok()) return false;
  if (api.NumDims(guard) == 1 && api.Dim(guard, 0) > 0) {
    const auto* numbers = static_cast<const int32_t*>(api.TensorData(guard));
    const int64_t most = (api.Dim(guard, 0) - 1) * static_cast<int64_t>(sizeof(int32_t));
    name.assign(reinterpret_cast<const char*>(numbers + 1), std::clamp<int64_t>(numbers[0], 0, most));
    const auto used = static_cast<int64_t>(1 + (name.size() + sizeof(int32_t) - 1) / sizeof(int32_t));
    if (api.Dim(guard, 0) == used + 4) {
      std::memcpy(&prescale, numbers + used, sizeof prescale);
      std::memcpy(&postscale, numbers + used + 2, sizeof postscale);
    }
  }
  api.DeleteTensor(guard);
  if (name.find('\0') != std::string::npos)
    outcome->set(kTfInvalidArgument, "a name cannot have a NUL character in it: " + name.substr(0, name.find('\0')));
  return outcome->ok();
}

bool Call::read_splits(Outcome* outcome) {
  TF_Tensor* input = nullptr;
  api.GetInput(ctx, 1, &input, *outcome);
  if (!outcome->ok()) return false;
  const bool is_list = api.NumDims(input) == 1;
  if (is_list) {
    const auto* rows = static_cast<const int32_t*>(api.TensorData(input));
    splits.assign(rows, rows + api.Dim(input, 0));
  }
  api.DeleteTensor(input);
  if (!is_list) outcome->set(kTfInvalidArgument, "alltoall expects a 1D splits tensor");
  return is_list;
}

bool Call::allocate_outputs(Outcome* outcome) {
  if (spec->result != Result::kAsInput) return true;
  for (int i = 0; i < static_cast<int>(tensors.size()); ++i) {
    Tensor& t = tensors[i];
    int forwarded = -1;
    TF_Tensor* output = api.ForwardInputOrAllocateOutput(ctx, &i, 1, i, t.shape.data(),
                                                         static_cast<int>(t.shape.size()), &forwarded, *outcome);
    if (!outcome->ok()) return false;
    t.out = api.TensorData(output);
    api.DeleteTensor(output);  // the context holds it
  }
  return true;
}

void free_block(void*, size_t, void* block) { hc_block_destroy(static_cast<hc_block*>(block)); }

// The core's memory becomes the output, without a copy.
bool Call::take_result(hc_handle handle, int i, Outcome* outcome) {
  hc_result result;
  hc_block* block = nullptr;
  if (hc_status* status = hc_take_result(runtime, handle, i, &result, &block)) {
    outcome->set(kTfInternal, hc_status_text(status));
    hc_status_destroy(status);
    return false;
  }
  Tensor& t = tensors[i];
  t.shape[0] = result.first_dimension;
  const size_t bytes = block ? hc_block_bytes(block) : 0;
  TF_Tensor* output;
  if (bytes) {
    output = api.NewTensor(t.type, t.shape.data(), static_cast<int>(t.shape.size()), hc_block_data(block), bytes,
                           free_block, block);
    api.SetOutput(ctx, i, output, *outcome);
  } else {
    hc_block_destroy(block);
    output = api.AllocateOutput(ctx, i, t.type, t.shape.data(), static_cast<int>(t.shape.size()), 0, *outcome);
  }
  api.DeleteTensor(output);
  if (!outcome->ok() || spec->op != HC_ALLTOALL) return outcome->ok();
  const std::span<const int64_t> rows(result.rows_from, static_cast<size_t>(result.rows_from_count));
  const std::vector<int32_t> received(rows.begin(), rows.end());
  if (!std::equal(rows.begin(), rows.end(), received.begin())) {
    outcome->set(kTfInvalidArgument,
                 "alltoall: a rank sent more rows than received_splits (int32) can say; send fewer");
    return false;
  }
  return give_numbers(1, received.data(), static_cast<int64_t>(received.size()), outcome);
}

// count < 0: a scalar.
bool give_int32(TF_OpKernelContext* ctx, int output, const int32_t* numbers, int64_t count, Outcome* outcome) {
  const size_t bytes = sizeof(int32_t) * (count < 0 ? 1 : count);
  TF_Tensor* tensor = api.AllocateOutput(ctx, output, kTfInt32, &count, count < 0 ? 0 : 1, bytes, *outcome);
  if (!outcome->ok()) return false;
  if (bytes) std::memcpy(api.TensorData(tensor), numbers, bytes);
  api.DeleteTensor(tensor);
  return true;
}

bool Call::give_numbers(int output, const int32_t* numbers, int64_t count, Outcome* outcome) {
  return give_int32(ctx, output, numbers, count, outcome);
}

bool Call::take_results(hc_handle handle, Outcome* outcome) {
  if (spec->result == Result::kNumber) {
    hc_result result;
    hc_block* block = nullptr;
    if (hc_status* status = hc_take_result(runtime, handle, 0, &result, &block)) {
      outcome->set(kTfInternal, hc_status_text(status));
      hc_status_destroy(status);
      return false;
    }
    hc_block_destroy(block);
    return give_numbers(0, &result.join_rank, -1, outcome);
  }
  if (spec->result == Result::kRows)
    for (int i = 0; i < static_cast<int>(tensors.size()); ++i)
      if (!take_result(handle, i, outcome)) return false;
  return true;
}

// On hc-notify.
void finish(void* context, hc_handle handle, const hc_status* status) {
  std::unique_ptr<Call> call(static_cast<Call*>(context));
  if (status) {
    call->fail(code_of(hc_status_code(status)), hc_status_text(status));
  } else {
    Outcome outcome;
    if (!call->take_results(handle, &outcome)) api.OpKernelContext_Failure(call->ctx, outcome);
  }
  hc_release(call->runtime, handle);
  const Done done = std::move(call->done);
  call.reset();  // done may end the step, and the process
  done();
}

// Gives the call away when it returns null.
hc_status* submit(const Kernel& kernel, std::unique_ptr<Call>* call, bool* has_runtime) {
  hc_request request{};
  request.version = HC_VERSION;
  request.op = kernel.spec->op;
  request.reduce = kernel.reduce;
  request.root = kernel.root;
  request.process_set = kernel.process_set;
  request.device = HC_HOST;
  const std::string& name = (*call)->name.empty() ? kernel.name : (*call)->name;
  request.name = name.empty() ? nullptr : name.c_str();
  request.prescale = (*call)->prescale;
  request.postscale = (*call)->postscale;
  const auto& splits = (*call)->splits;
  request.splits = splits.empty() ? nullptr : splits.data();
  request.split_count = static_cast<int32_t>(splits.size());
  request.done = finish;
  request.done_context = call->get();
  std::vector<hc_tensor> tensors;
  tensors.reserve((*call)->tensors.size());
  for (const Tensor& t : (*call)->tensors)
    tensors.push_back({t.in, t.out, t.shape.data(), static_cast<int32_t>(t.shape.size()), dtype_of(t.type)});

  const auto lease = runtime_pointer().lease();
  *has_runtime = lease.get() != nullptr;
  if (!*has_runtime) return nullptr;
  (*call)->runtime = lease.get();
  hc_handle handle = 0;
  hc_status* status = hc_submit(lease.get(), &request, tensors.data(), static_cast<int32_t>(tensors.size()), &handle);
  if (!status) (void)call->release();  // finish may have run already
  return status;
}

void compute(void* opaque, TF_OpKernelContext* ctx, TF_AsyncOpKernelDoneCallback* done) {
  const Kernel& kernel = *static_cast<const Kernel*>(opaque);
  auto call = std::make_unique<Call>();
  call->spec = kernel.spec;
  call->ctx = ctx;
  call->prescale = kernel.prescale;
  call->postscale = kernel.postscale;
  if (!copy_done(done, &call->done)) {
    call->fail(kTfUnimplemented, "this TensorFlow's completion callback cannot be kept: it is no std::function");
    return api.RunAsyncOpKernelDoneCallback(done);
  }
  Outcome outcome;
  if (!call->read_inputs(&outcome) || !call->allocate_outputs(&outcome)) {
    api.OpKernelContext_Failure(ctx, outcome);
    return call->done();
  }
  // Iterations of a loop may run side by side, and in another order on each rank.
  if (call->name.empty() && !kernel.name.empty() && api.GetFrameId(ctx) != 0)
    call->name = kernel.name + " (iteration " + std::to_string(api.GetIterId(ctx) % kIterationsAtOnce) + ", modulo " +
                 std::to_string(kIterationsAtOnce) + ")";
  bool has_runtime = false;
  hc_status* status = submit(kernel, &call, &has_runtime);
  if (has_runtime && !status) return;
  if (!has_runtime) call->fail(kTfFailedPrecondition, kNotInitialized);
  if (status) call->fail(code_of(hc_status_code(status)), hc_status_text(status));
  hc_status_destroy(status);
  call->done();
}

class Attributes {
 public:
  explicit Attributes(TF_OpKernelConstruction* ctx) : ctx_(ctx) {}
  int32_t number(const char* name) {
    int32_t value = 0;
    api.OpKernelConstruction_GetAttrInt32(ctx_, name, &value, outcome_);
    return value;
  }
  bool flag(const char* name) {
    unsigned char value = 0;
    api.OpKernelConstruction_GetAttrBool(ctx_, name, &value, outcome_);
    return value != 0;
  }
  std::string text(const char* name) {
    int32_t list = 0, bytes = 0;
    api.OpKernelConstruction_GetAttrSize(ctx_, name, &list, &bytes, outcome_);
    if (!outcome_.ok() || bytes <= 0) return "";
    std::string value(bytes, '\0');
    api.OpKernelConstruction_GetAttrString(ctx_, name, value.data(), value.size(), outcome_);
    return value;
  }
  double scale(const char* name) { return std::strtod(text(name).c_str(), nullptr); }
  void refuse(const std::string& why) { outcome_.set(kTfInvalidArgument, why); }
  // Tells TensorFlow when an attribute was missing or refused; the kernel is then never run.
  void check() {
    if (!outcome_.ok()) api.OpKernelConstruction_Failure(ctx_, outcome_);
  }

 private:
  TF_OpKernelConstruction* ctx_;
  Outcome outcome_;
};

// In a graph the node's name is the key. Run eagerly, the node is called like its type, and the guard has the name.
std::string name_of(TF_OpKernelConstruction* ctx, const OpSpec& spec, Attributes* attributes) {
  const TF_StringView view = api.OpKernelConstruction_GetName(ctx);
  std::string name(view.data, view.len);
  if (name == spec.type) return attributes->text("tensor_name");
  if (spec.op != HC_JOIN && attributes->flag("ignore_name_scope"))
    if (const size_t slash = name.rfind('/'); slash != std::string::npos) name.erase(0, slash + 1);
  return name;
}

template <int which>
void* create(TF_OpKernelConstruction* ctx) {
  const OpSpec& spec = kCollectives[which];
  auto kernel = std::make_unique<Kernel>();
  kernel->spec = &spec;
  Attributes attributes(ctx);
  if (spec.op != HC_JOIN) {
    kernel->name = name_of(ctx, spec, &attributes);
    kernel->process_set = attributes.number("process_set_id");
  }
  if (spec.op == HC_BROADCAST) kernel->root = attributes.number("root_rank");
  if (spec.reduces) {
    kernel->reduce = attributes.number("reduce_op");
    kernel->prescale = attributes.scale("prescale_factor");
    kernel->postscale = attributes.scale("postscale_factor");
  }
  if (kernel->name.find('\0') != std::string::npos)
    attributes.refuse("a name cannot have a NUL character in it: " + kernel->name.substr(0, kernel->name.find('\0')));
  attributes.check();
  return kernel.release();
}

void destroy(void* kernel) { delete static_cast<Kernel*>(kernel); }

// --- values --------------------------------------------------------------------------------------------------------

int32_t read_value(hc_runtime* runtime, const ValueSpec& spec, int32_t process_set) {
  switch (spec.value) {
    case Value::kSize:
      return hc_process_set_size(runtime, process_set);
    case Value::kRank:
      return hc_process_set_rank(runtime, process_set);
    case Value::kLocalSize:
      return hc_get(runtime, HC_LOCAL_SIZE);
    case Value::kLocalRank:
      return hc_get(runtime, HC_LOCAL_RANK);
    case Value::kIncluded:
      return hc_process_set_rank(runtime, process_set) >= 0;
    case Value::kGuard:
      return 0;
  }
  return -1;
}

struct ValueKernel {
  int32_t process_set = 0;
};

template <int which>
void* create_value(TF_OpKernelConstruction* ctx) {
  auto kernel = std::make_unique<ValueKernel>();
  Attributes attributes(ctx);
  if (kValues[which].of_process_set) kernel->process_set = attributes.number("process_set_id");
  attributes.check();
  return kernel.release();
}

template <int which>
void compute_value(void* opaque, TF_OpKernelContext* ctx) {
  const ValueSpec& spec = kValues[which];
  const int32_t process_set = static_cast<const ValueKernel*>(opaque)->process_set;
  const auto lease = runtime_pointer().lease();
  Outcome outcome;
  if (!lease.get() && spec.value != Value::kGuard) {
    outcome.set(kTfFailedPrecondition, kNotInitialized);
  } else if (spec.of_process_set && hc_process_set_size(lease.get(), process_set) == 0) {
    outcome.set(kTfInvalidArgument, std::string(spec.type) + ": Process set " + std::to_string(process_set) +
                                        " does not exist, or has not been registered.");
  } else {
    const int32_t value = read_value(lease.get(), spec, process_set);
    if (give_int32(ctx, 0, &value, -1, &outcome)) return;
  }
  api.OpKernelContext_Failure(ctx, outcome);
}

void destroy_value(void* kernel) { delete static_cast<ValueKernel*>(kernel); }

// --- registration --------------------------------------------------------------------------------------------------

// On a GPU everything is in host memory: TensorFlow copies. Its C API has no stream of an NVIDIA device for us.
std::string add(TF_KernelBuilder* builder, const std::string& type, const std::vector<const char*>& on_host) {
  for (const char* argument : on_host) api.KernelBuilder_HostMemory(builder, argument);
  Outcome outcome;
  api.RegisterKernelBuilder(type.c_str(), builder, outcome);
  return outcome.ok() ? "" : type + ": " + outcome.text();
}

template <int which>
std::string add_collective() {
  const OpSpec& spec = kCollectives[which];
  std::vector<const char*> arguments = {spec.output};
  if (spec.op != HC_JOIN) arguments.insert(arguments.end(), {spec.grouped ? "tensors" : "tensor", "guard"});
  if (spec.op == HC_ALLTOALL) arguments.insert(arguments.end(), {"splits", "received_splits"});
  for (const char* device : {"CPU", "GPU"}) {
    auto* builder = api.NewAsyncKernelBuilder(spec.type, device, create<which>, compute, destroy);
    const bool on_host = std::string_view(device) == "GPU";
    if (std::string problem = add(builder, spec.type, on_host ? arguments : std::vector<const char*>{});
        !problem.empty())
      return problem;
  }
  return "";
}

template <int which>
std::string add_value() {
  const ValueSpec& spec = kValues[which];
  for (const char* device : {"CPU", "GPU"}) {
    auto* builder = api.NewKernelBuilder(spec.type, device, create_value<which>, compute_value<which>, destroy_value);
    const bool on_host = std::string_view(device) == "GPU";
    std::vector<const char*> arguments;
    if (on_host) arguments.push_back(spec.output);
    if (std::string problem = add(builder, spec.type, arguments); !problem.empty()) return problem;
  }
  return "";
}

template <int... which>
std::string add_collectives(std::integer_sequence<int, which...>) {
  std::string problem;
  ((problem = problem.empty() ? add_collective<which>() : problem), ...);
  return problem;
}

template <int... which>
std::string add_values(std::integer_sequence<int, which...>) {
  std::string problem;
  ((problem = problem.empty() ? add_value<which>() : problem), ...);
  return problem;
}

}  // namespace

std::string register_kernels() {
  std::string problem = add_collectives(std::make_integer_sequence<int, kCollectiveCount>{});
  return problem.empty() ? add_values(std::make_integer_sequence<int, kValueCount>{}) : problem;
}

}  // namespace hc::tensorflow
