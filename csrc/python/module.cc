// The Python binding: horoclone._core (its contract is horoclone/_core.pyi). Uses the core as any other program would,
// through horoclone.h. The GIL is released wherever the core may wait; no native thread ever calls into Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "connect.h"
#include "fast_path.h"
#include "horoclone_tools.h"
#include "interruption.h"
#include "memory.h"
#include "quantize.h"
#include "raising.h"
#include "servers.h"
#include "strict_numbers.h"
#include "text.h"
#include "tools/python/levels.h"
#include "tools/python/simulate.h"
#include "wait_slice.h"
#include "without_gil.h"

namespace py = pybind11;

namespace {

constexpr int kMaxDimensions = 64;

// The numbers of a shape or of splits, from a tuple (torch.Size is one), a list or any sequence.
class Numbers {
 public:
  explicit Numbers(py::handle sequence, const char* what) {
    PyObject* fast = PySequence_Fast(sequence.ptr(), what);
    if (!fast) throw py::error_already_set();
    py::object owner = py::reinterpret_steal<py::object>(fast);
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
    int64_t* to = few_;
    if (n > kMaxDimensions) {
      many_.resize(n);
      to = many_.data();
    }
    for (Py_ssize_t i = 0; i < n; ++i) {
      to[i] = PyLong_AsLongLong(PySequence_Fast_GET_ITEM(fast, i));
      if (to[i] == -1 && PyErr_Occurred()) throw py::error_already_set();
    }
    data = to;
    size = static_cast<int32_t>(n);
  }
  Numbers(const Numbers&) = delete;
  const int64_t* data;
  int32_t size;

 private:
  int64_t few_[kMaxDimensions];
  std::vector<int64_t> many_;
};

// As the C API takes them; the map must outlive this.
struct Settings {
  explicit Settings(const std::map<std::string, std::string>& settings) {
    for (const auto& [name, value] : settings) {
      names.push_back(name.c_str());
      values.push_back(value.c_str());
    }
  }
  int32_t count() const { return static_cast<int32_t>(names.size()); }
  std::vector<const char*> names, values;
};

std::string device_report(const std::map<std::string, std::string>& settings) {
  const Settings given(settings);
  return hc_device_report(given.names.data(), given.values.data(), given.count());
}

std::string selection_report(const std::map<std::string, std::string>& settings) {
  const Settings given(settings);
  return hc_selection_report(given.names.data(), given.values.data(), given.count());
}

using hc_python::Block;
using hc_python::DeviceBlock;
using hc_python::Factor;
using hc_python::raise_if;
using hc_python::Result;
using hc_python::Whole;
using hc_python::WithoutGil;

class Runtime {
 public:
  explicit Runtime(const std::map<std::string, std::string>& settings) {
    const Settings given(settings);
    raise_if(hc_runtime_create(given.names.data(), given.values.data(), given.count(), &rt_));
  }
  ~Runtime() {
    if (forked_) return;  // the engine's thread does not exist here: nothing can be joined
    WithoutGil released;
    hc_runtime_destroy(rt_);
  }
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  py::bytes endpoint() const {
    size_t bytes = 0;
    const uint8_t* data = hc_endpoint(rt_, &bytes);
    return {reinterpret_cast<const char*>(data), bytes};
  }

  void connect(int rank, const std::vector<std::string>& endpoints, const std::string& secret, const std::string& job,
               uint64_t generation, double timeout_s, const std::optional<hc_python::MpiHandles>& mpi,
               const py::object& look) {
    raise_if(hc_python::connect_interruptibly(rt_, {rank, endpoints, secret, job, generation, timeout_s, mpi, look}));
  }

  int fact(hc_fact which) const { return hc_get(rt_, which); }

  hc_handle submit(int op, py::handle name, uintptr_t in, uintptr_t out, py::handle shape, int dtype, int reduce,
                   Factor prescale, Factor postscale, Whole<int> root, int process_set, py::handle splits,
                   Whole<int64_t> tag, int device, uintptr_t stream, Whole<int> priority) {
    return submit_one({op, reduce, root, process_set, prescale, postscale, tag, device, stream, priority}, name, in,
                      out, shape, dtype, splits, false);
  }

  // The core-owned result, where `out` is 0 and there is one.
  std::unique_ptr<Result> run(int op, py::handle name, uintptr_t in, uintptr_t out, py::handle shape, int dtype,
                              int reduce, Factor prescale, Factor postscale, Whole<int> root, int process_set,
                              py::handle splits) {
    const hc_handle handle =
        submit_one({op, reduce, root, process_set, prescale, postscale}, name, in, out, shape, dtype, splits, true);
    if (handle == 0) return nullptr;  // it is over, and there is no result
    std::unique_ptr<Result> made;
    try {
      wait(handle);
      if (!out && op != HC_BARRIER) made = result(handle, 0);
    } catch (py::error_already_set& error) {
      break_off(handle, hc_python::interruption_by(error.type().ptr(), error.value().ptr()));
      throw;
    } catch (...) {
      break_off(handle, "was interrupted");
      throw;
    }
    hc_release(rt_, handle);
    return made;
  }

  // A signal's exception (Ctrl-C) came while the core still reads and writes the caller's memory, which may go away
  // now: end it.
  void break_off(hc_handle handle, const std::string& text) {
    if (!hc_poll(rt_, handle)) {
      WithoutGil released;
      hc_break_off(rt_, handle, text.c_str());
    }
    hc_release(rt_, handle);  // no harm where wait() has released it
  }

  hc_handle submit_group(int op, py::handle name, py::sequence ins, py::sequence outs, py::sequence shapes,
                         py::sequence dtypes, int reduce, Factor prescale, Factor postscale, Whole<int> root,
                         int process_set, int device, uintptr_t stream, Whole<int> priority) {
    const size_t n = ins.size();
    if (outs.size() != n || shapes.size() != n || dtypes.size() != n)
      throw py::value_error("data_in, data_out, shapes and dtypes must have one entry per tensor");
    std::vector<std::vector<int64_t>> dimensions(n);
    std::vector<hc_tensor> tensors(n);
    for (size_t i = 0; i < n; ++i) {
      Numbers numbers(shapes[i], "a shape must be a sequence of integers");
      dimensions[i].assign(numbers.data, numbers.data + numbers.size);
      tensors[i] = {reinterpret_cast<const void*>(ins[i].cast<uintptr_t>()),
                    reinterpret_cast<void*>(outs[i].cast<uintptr_t>()), dimensions[i].data(), numbers.size,
                    dtypes[i].cast<int32_t>()};
    }
    hc_request request = request_for({op, reduce, root, process_set, prescale, postscale, 0, device, stream, priority});
    request.name = name_of(name);
    return send(request, tensors.data(), static_cast<int32_t>(n));
  }

  int declare(py::sequence names, py::sequence data, py::sequence counts, py::sequence dtypes, int reduce,
              Factor prescale, Factor postscale, int process_set, int device) {
    const size_t n = names.size();
    if (data.size() != n || counts.size() != n || dtypes.size() != n)
      throw py::value_error("names, data, counts and dtypes must have one entry per bucket");
    std::vector<std::string> texts(n);
    std::vector<const char*> pointers(n);
    std::vector<int64_t> sizes(n);
    std::vector<hc_tensor> tensors(n);
    for (size_t i = 0; i < n; ++i) {
      texts[i] = names[i].cast<std::string>();
      pointers[i] = texts[i].c_str();
      sizes[i] = counts[i].cast<int64_t>();
      void* at = reinterpret_cast<void*>(data[i].cast<uintptr_t>());
      tensors[i] = {at, at, &sizes[i], 1, dtypes[i].cast<int32_t>()};
    }
    const hc_request request = request_for({HC_ALLREDUCE, reduce, 0, process_set, prescale, postscale, 0, device, 0});
    int32_t id = 0;
    hc_status* status;
    {
      WithoutGil released;
      status = hc_declare(rt_, &request, pointers.data(), tensors.data(), static_cast<int32_t>(n), &id);
    }
    raise_if(status);
    return id;
  }
  hc_handle submit_declared(int process_set, int id, int bucket, uintptr_t stream, int priority) {
    hc_handle handle = 0;
    raise_if(hc_submit_declared(rt_, process_set, id, bucket, reinterpret_cast<void*>(stream), priority, &handle));
    return handle;
  }
  void undeclare(int process_set, int id) { raise_if(hc_undeclare(rt_, process_set, id)); }
  bool poll(hc_handle handle) const { return hc_poll(rt_, handle) != 0; }

  void wait(hc_handle handle) {
    if (handle == 0) return;
    int32_t done = 0;
    while (true) {
      hc_status* status;
      {
        WithoutGil released;
        status = hc_wait(rt_, handle, hc_python::kWaitSliceS, &done);
      }
      if (done) {
        if (status) hc_release(rt_, handle);
        raise_if(status);
        return;
      }
      hc_status_destroy(status);
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      relieve_memory();
    }
  }

  bool advance(hc_handle handle) {
    WithoutGil released;
    return hc_advance(rt_, handle) != 0;
  }

  // Whether it is done within the limit; what became of it wait() tells.
  bool is_done_within(hc_handle handle, double limit_s) {
    if (limit_s <= 0) return poll(handle);
    const auto waited = hc_python::wait_in_slices(rt_, handle, limit_s, [&] { relieve_memory(); });
    if (waited == hc_python::Waited::kRaised) throw py::error_already_set();
    return waited != hc_python::Waited::kLate || poll(handle);
  }

  // `free` lets GPU memory go that the framework keeps for later; called from wait() when the core lacks some.
  void offer_memory(py::object free) {
    free_memory_ = std::move(free);
    hc_memory_pressure(rt_, HC_MEMORY_CAN_FREE);
  }
  void trim_memory() { hc_memory_pressure(rt_, HC_MEMORY_IS_LACKING); }
  void relieve_memory() {
    if (!free_memory_ || !hc_memory_pressure(rt_, HC_MEMORY_IS_WANTED)) return;
    free_memory_();
    hc_memory_pressure(rt_, HC_MEMORY_FREED);
  }

  std::unique_ptr<Result> result(hc_handle handle, int index) {
    hc_result taken{};
    hc_block* memory = nullptr;
    raise_if(hc_take_result(rt_, handle, index, &taken, &memory));
    return std::make_unique<Result>(memory, taken);
  }
  void release(hc_handle handle) { hc_release(rt_, handle); }
  void stream_wait(hc_handle handle, uintptr_t stream) {
    raise_if(hc_stream_wait(rt_, handle, reinterpret_cast<void*>(stream)));
  }
  void copy_result(hc_handle handle, int index, uintptr_t to, size_t bytes, uintptr_t stream) {
    raise_if(hc_copy_result(rt_, handle, index, reinterpret_cast<void*>(to), bytes, reinterpret_cast<void*>(stream)));
  }
  int add_process_set(const std::vector<int32_t>& ranks) {
    int32_t id = 0;
    hc_status* status;
    {
      WithoutGil released;
      status = hc_process_set_add(rt_, ranks.data(), static_cast<int32_t>(ranks.size()), &id);
    }
    raise_if(status);
    return id;
  }
  void remove_process_set(int id) {
    hc_status* status;
    {
      WithoutGil released;
      status = hc_process_set_remove(rt_, id);
    }
    raise_if(status);
  }

  std::unique_ptr<Block> allocate(size_t bytes) {
    hc_block* block = nullptr;
    raise_if(hc_block_create(rt_, bytes, &block));
    return std::make_unique<Block>(block);
  }
  std::unique_ptr<DeviceBlock> allocate_on_device(int device, size_t bytes) {
    hc_block* block = nullptr;
    raise_if(hc_device_block_create(rt_, device, bytes, &block));
    return std::make_unique<DeviceBlock>(block);
  }
  bool shares_memory() const { return hc_shares_memory(rt_) != 0; }

  void abort(const std::string& text) {
    WithoutGil released;
    hc_abort(rt_, text.c_str());
  }
  void say_ending() {
    WithoutGil released;
    hc_say_ending(rt_);
  }
  bool all_are_ending() {
    WithoutGil released;
    return hc_all_are_ending(rt_) != 0;
  }
  void shutdown(double timeout_s) {
    hc_status* status;
    {
      WithoutGil released;
      status = hc_shutdown(rt_, timeout_s);
    }
    raise_if(status);
  }
  void after_fork_child() {
    forked_ = true;
    hc_after_fork_child(rt_);
  }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(rt_); }
  void start_timeline(const std::string& path, bool mark_cycles) {
    hc_status* status;
    {
      WithoutGil released;
      status = hc_timeline_start(rt_, path.c_str(), mark_cycles);
    }
    raise_if(status);
  }
  void stop_timeline() {
    hc_status* status;
    {
      WithoutGil released;
      status = hc_timeline_stop(rt_);
    }
    raise_if(status);
  }
  void timeline_span(const std::string& name, double from_s, double seconds, const std::string& args) {
    hc_timeline_span(rt_, name.c_str(), from_s, seconds, args.c_str());
  }
  void listen_to_timeline() { raise_if(hc_timeline_listen(rt_)); }
  py::str heard_of_timeline() const {
    std::string events;
    {
      WithoutGil released;
      events = hc_timeline_heard(rt_);
    }
    return hc_python::shown(events);
  }
  void watch_stack(int signal, int fd, int thread, const std::string& libraries) {
    hc_watch_stack(rt_, signal, fd, thread, libraries.c_str());
  }
  py::str flight_record(const std::string& reason) const {
    std::string record;
    {
      WithoutGil released;
      record = hc_flight_record(rt_, reason.c_str());
    }
    return hc_python::shown(record);
  }
  void share_rank_metrics(int fd, uint64_t offset, const std::string& program) {
    raise_if(hc_rank_metrics_share(rt_, fd, offset, program.c_str()));
  }
  py::bytes rank_metrics() const { return py::bytes(hc_rank_metrics(rt_), HC_RANK_METRICS_BYTES); }
  py::str counters() const { return hc_python::shown(hc_counters(rt_)); }
  py::str describe() const {
    std::string text;
    {
      WithoutGil released;
      text = hc_describe(rt_);
    }
    return hc_python::shown(text);
  }

 private:
  struct Kind {
    int op, reduce, root, process_set;
    double prescale, postscale;
    int64_t tag = 0;
    int device = -1;  // of CUDA; -1: host memory
    uintptr_t stream = 0;
    int priority = 0;
  };
  static hc_request request_for(const Kind& k) {
    hc_request r{};
    r.version = HC_VERSION;
    r.op = k.op;
    r.reduce = k.reduce;
    r.root = k.root;
    r.process_set = k.process_set;
    r.prescale = k.prescale;
    r.postscale = k.postscale;
    r.tag = k.tag;
    r.priority = k.priority;
    r.device = k.device < 0 ? HC_HOST : HC_CUDA;
    r.device_index = k.device;
    r.stream = reinterpret_cast<void*>(k.stream);
    return r;
  }
  static const char* name_of(py::handle name) {
    if (name.is_none()) return nullptr;
    if (!PyUnicode_Check(name.ptr()))
      throw py::type_error("name=" + std::string(py::repr(name)) +
                           ": a name is a text; pass None for an unnamed operation");
    Py_ssize_t bytes = 0;
    const char* text = PyUnicode_AsUTF8AndSize(name.ptr(), &bytes);  // lives as long as the string
    if (!text) throw py::error_already_set();
    if (std::strlen(text) != static_cast<size_t>(bytes))
      throw py::value_error("name=" + std::string(py::repr(name)) + ": a name cannot have a NUL character in it");
    if (!*text) throw py::value_error("an empty name; pass None for an unnamed operation");
    return text;
  }
  hc_handle send(const hc_request& request, const hc_tensor* tensors, int32_t n) {
    hc_handle handle = 0;
    raise_if((request.will_wait ? hc_call : hc_submit)(rt_, &request, tensors, n, &handle));
    return handle;
  }
  hc_handle submit_one(const Kind& kind, py::handle name, uintptr_t in, uintptr_t out, py::handle shape, int dtype,
                       py::handle splits, bool will_wait) {
    const bool bare = kind.op == HC_BARRIER || kind.op == HC_JOIN || shape.is_none();
    const py::tuple empty;
    Numbers dimensions(bare ? py::handle(empty) : shape, "a shape must be a sequence of integers");
    hc_request request = request_for(kind);
    request.name = name_of(name);
    request.will_wait = will_wait;
    hc_tensor tensor{reinterpret_cast<const void*>(in), reinterpret_cast<void*>(out), dimensions.data, dimensions.size,
                     dtype};
    if (splits.is_none()) return send(request, &tensor, bare ? 0 : 1);
    Numbers rows(splits, "splits must be a sequence of integers");
    static const int64_t none[1] = {0};
    request.splits = rows.size ? rows.data : none;
    request.split_count = rows.size;
    return send(request, &tensor, bare ? 0 : 1);
  }

  hc_runtime* rt_ = nullptr;
  bool forked_ = false;
  py::object free_memory_;  // null: nobody offers any
};

void add_facts(py::class_<Runtime>* runtime) {
  const auto fact = [](hc_fact which) { return [which](const Runtime& rt) { return rt.fact(which); }; };
  runtime->def_property_readonly("rank", fact(HC_RANK))
      .def_property_readonly("size", fact(HC_SIZE))
      .def_property_readonly("local_rank", fact(HC_LOCAL_RANK))
      .def_property_readonly("local_size", fact(HC_LOCAL_SIZE))
      .def_property_readonly("cross_rank", fact(HC_CROSS_RANK))
      .def_property_readonly("cross_size", fact(HC_CROSS_SIZE))
      .def_property_readonly("address", &Runtime::address)
      .def_property_readonly("is_homogeneous", [](const Runtime& rt) { return rt.fact(HC_IS_HOMOGENEOUS) != 0; });
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The native module of horoclone; see _core.pyi.";
  hc_python::add_memory(m);
  hc_python::add_quantize(m);
  hc_python::add_servers(m);
  hc_python::add_levels(m);
  hc_python::add_simulate(m);
  hc_python::add_fast_path(m);
  using namespace py::literals;
  py::class_<Runtime> runtime(m, "Runtime");
  add_facts(&runtime);
  runtime.def(py::init<const std::map<std::string, std::string>&>(), "settings"_a)
      .def("endpoint", &Runtime::endpoint)
      .def("connect", &Runtime::connect, "rank"_a, "endpoints"_a, "secret"_a, "job"_a, "generation"_a, "timeout_s"_a,
           "mpi"_a = py::none(), "look"_a = py::none())
      .def("submit", &Runtime::submit, "op"_a, "name"_a, "data_in"_a, "data_out"_a, "shape"_a, "dtype"_a,
           "reduce"_a = 1, "prescale"_a = 1.0, "postscale"_a = 1.0, "root"_a = 0, "process_set"_a = 0,
           "splits"_a = py::none(), "tag"_a = 0, "device"_a = -1, "stream"_a = 0, "priority"_a = 0)
      .def("submit_group", &Runtime::submit_group, "op"_a, "name"_a, "data_in"_a, "data_out"_a, "shapes"_a, "dtypes"_a,
           "reduce"_a = 1, "prescale"_a = 1.0, "postscale"_a = 1.0, "root"_a = 0, "process_set"_a = 0, "device"_a = -1,
           "stream"_a = 0, "priority"_a = 0)
      .def("run", &Runtime::run, "op"_a, "name"_a, "data_in"_a, "data_out"_a, "shape"_a, "dtype"_a, "reduce"_a = 1,
           "prescale"_a = 1.0, "postscale"_a = 1.0, "root"_a = 0, "process_set"_a = 0, "splits"_a = py::none())
      .def("declare", &Runtime::declare, "names"_a, "data"_a, "counts"_a, "dtypes"_a, "reduce"_a = 1,
           "prescale"_a = 1.0, "postscale"_a = 1.0, "process_set"_a = 0, "device"_a = -1)
      .def("submit_declared", &Runtime::submit_declared, "process_set"_a, "id"_a, "bucket"_a, "stream"_a = 0,
           "priority"_a = 0)
      .def("undeclare", &Runtime::undeclare, "process_set"_a, "id"_a)
      .def("offer_memory", &Runtime::offer_memory, "free"_a)
      .def("trim_memory", &Runtime::trim_memory, py::call_guard<py::gil_scoped_release>())
      .def("poll", &Runtime::poll, "handle"_a)
      .def("wait", &Runtime::wait, "handle"_a)
      .def("advance", &Runtime::advance, "handle"_a)
      .def("is_done_within", &Runtime::is_done_within, "handle"_a, "limit_s"_a)
      .def("result", &Runtime::result, "handle"_a, "index"_a = 0)
      .def("release", &Runtime::release, "handle"_a)
      .def("stream_wait", &Runtime::stream_wait, "handle"_a, "stream"_a)
      .def("copy_result", &Runtime::copy_result, "handle"_a, "index"_a, "to"_a, "nbytes"_a, "stream"_a)
      .def("add_process_set", &Runtime::add_process_set, "ranks"_a)
      .def("remove_process_set", &Runtime::remove_process_set, "id"_a)
      .def("allocate", &Runtime::allocate, "nbytes"_a)
      .def("allocate_on_device", &Runtime::allocate_on_device, "device"_a, "nbytes"_a)
      .def("shares_memory", &Runtime::shares_memory)
      .def("abort", &Runtime::abort, "text"_a)
      .def("say_ending", &Runtime::say_ending)
      .def("all_are_ending", &Runtime::all_are_ending)
      .def("shutdown", &Runtime::shutdown, "timeout_s"_a = 5.0)
      .def("after_fork_child", &Runtime::after_fork_child)
      .def("start_timeline", &Runtime::start_timeline, "path"_a, "mark_cycles"_a = false)
      .def("stop_timeline", &Runtime::stop_timeline)
      .def("listen_to_timeline", &Runtime::listen_to_timeline)
      .def("heard_of_timeline", &Runtime::heard_of_timeline)
      .def("timeline_span", &Runtime::timeline_span, "name"_a, "from_s"_a, "seconds"_a, "args"_a = "")
      .def("watch_stack", &Runtime::watch_stack, "signal"_a, "fd"_a, "thread"_a, "libraries"_a)
      .def("flight_record", &Runtime::flight_record, "reason"_a = "asked for")
      .def("share_rank_metrics", &Runtime::share_rank_metrics, "fd"_a, "offset"_a, "program"_a)
      .def("rank_metrics", &Runtime::rank_metrics)
      .def("counters", &Runtime::counters)
      .def("describe", &Runtime::describe);
  m.def("take_log", [](bool takes) { hc_log_take(takes); }, "takes"_a);
  m.def(
      "log_warning",
      [](int rank, const std::string& text) {
        hc_python::WithoutGil released;
        hc_log_warning(rank, text.c_str());
      },
      "rank"_a, "text"_a);
  m.def("log_lines", [] {
    std::string lines;
    {
      hc_python::WithoutGil released;
      lines = hc_log_lines();
    }
    return hc_python::shown(lines);
  });
  m.def("knobs", &hc_knobs);
  m.def("fail_at_exit", [] {
    (void)::on_exit(
        [](int status, void*) {
          (void)std::fflush(nullptr);
          ::_exit(status ? status : 1);
        },
        nullptr);
  });
  m.def("build_info", &hc_build_info);
  m.def("selection_report", &selection_report, "settings"_a);
  m.def("device_report", &device_report, "settings"_a);
  hc_python::add_raising(m);
}
