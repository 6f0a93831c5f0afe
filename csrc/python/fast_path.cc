// The fast path of an allreduce of plain tensors (plain_tensors.h), blocking or not, and of its end; and of the
// operations of torch.distributed. It handles the correct and common case; otherwise, and for every wrong
// argument, it returns None, and the caller takes the slow path, which reports what is wrong. It uses CPython's own
// calling convention (METH_FASTCALL), because pybind11's takes as long as the core's whole submission.
#include "fast_path.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstring>
#include <vector>

#include "interruption.h"
#include "plain_tensors.h"
#include "wait_slice.h"
#include "without_gil.h"

namespace py = pybind11;

namespace hc_python {
namespace {

constexpr size_t kGivenKept = 256;

struct Given {
  hc_handle handle;
  uint64_t thread;
};

// The system's own numbers of threads are given again once a thread has ended.
uint64_t this_thread() {
  static std::atomic<uint64_t> last{0};
  thread_local const uint64_t number = ++last;
  return number;
}

struct FastPath {
  PyObject_HEAD PyObject* runtime;  // keeps rt
  hc_runtime* rt;
  PyObject* kinds;    // tuple of exact types
  PyObject* capsule;  // keeps exchange; None: buffer protocol
  const DlExchange* exchange;
  PyObject* everybody;  // the process set whose number is 0
  PyObject* pending;    // dict: handle -> output, or (output, what must live, None); the caller's own
  double limit_s;       // of collective(); 0: none
  // The last outputs that finish() gave, and to which threads. Guarded by the GIL.
  Given given[kGivenKept];
  size_t given_count;
};

bool is_one_of(PyObject* kinds, PyObject* object) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds); ++i)
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == PyTuple_GET_ITEM(kinds, i)) return true;
  return false;
}

// The arguments behind the tensors, as the public functions have them.
enum : Py_ssize_t { kSource, kTarget, kAverage, kName, kReduce, kPrescale, kPostscale, kProcessSet, kPriority, kCount };

// False: not plain.
bool read_int(PyObject* number, long low, long high, int32_t* out) {
  if (!PyLong_CheckExact(number)) return false;
  int overflow = 0;
  const long value = PyLong_AsLongAndOverflow(number, &overflow);
  if (overflow != 0 || value < low || value > high) return false;
  *out = static_cast<int32_t>(value);
  return true;
}

bool read_name(PyObject* name, const char** out) {
  if (name == Py_None) return true;
  if (!PyUnicode_CheckExact(name)) return false;
  Py_ssize_t bytes = 0;
  *out = PyUnicode_AsUTF8AndSize(name, &bytes);  // lives as long as the string
  if (!*out) PyErr_Clear();
  return *out && bytes > 0 && std::strlen(*out) == static_cast<size_t>(bytes);
}

bool read_request(const FastPath* fast_path, PyObject* const* args, hc_request* r) {
  r->version = HC_VERSION;
  r->op = HC_ALLREDUCE;
  r->reduce = HC_AVERAGE;
  r->device_index = -1;
  if (args[kAverage] != Py_None || args[kProcessSet] != fast_path->everybody) return false;
  if (args[kReduce] != Py_None && !read_int(args[kReduce], 0, HC_REDUCTIONS - 1, &r->reduce)) return false;
  if (!PyFloat_CheckExact(args[kPrescale]) || !PyFloat_CheckExact(args[kPostscale])) return false;
  r->prescale = PyFloat_AS_DOUBLE(args[kPrescale]);
  r->postscale = PyFloat_AS_DOUBLE(args[kPostscale]);
  if (std::isnan(r->prescale) || std::isnan(r->postscale)) return false;  // refused, see strict_numbers.h
  return read_int(args[kPriority], INT32_MIN, INT32_MAX, &r->priority) && read_name(args[kName], &r->name);
}

bool read_tensors(const FastPath* fast_path, PyObject* source, PyObject* target, PlainTensors* out) {
  return is_one_of(fast_path->kinds, source) && (source == target || is_one_of(fast_path->kinds, target)) &&
         out->add(source, target);
}

// Writes down what must live until the operation is done, or until its error has been asked for.
PyObject* remember(const FastPath* fast_path, PyObject* source, PyObject* target, hc_handle number) {
  PyObject* handle = PyLong_FromLongLong(number);
  PyObject* kept = target;
  if (source == target && !PyTuple_CheckExact(kept))  // a tuple of tensors would be read as the triple
    Py_INCREF(kept);
  else
    kept = PyTuple_Pack(3, target, source, Py_None);
  if (handle && kept && PyDict_SetItem(fast_path->pending, handle, kept) == 0) {
    Py_DECREF(kept);
    return handle;
  }
  // No memory: the operation runs, so its tensors are never let go.
  Py_INCREF(source);
  Py_INCREF(target);
  Py_XDECREF(handle);
  Py_XDECREF(kept);
  return nullptr;
}

PyObject* submit(const FastPath* fast_path, PyObject* const* args, const hc_request& request,
                 const PlainTensors& tensors) {
  hc_handle number = 0;
  if (hc_status* status = hc_submit(fast_path->rt, &request, tensors.data(), tensors.count(), &number)) {
    hc_status_destroy(status);
    Py_RETURN_NONE;
  }
  return remember(fast_path, args[kSource], args[kTarget], number);
}

// A signal's exception (Ctrl-C) is set: ends what the core still reads and writes the caller's memory for.
PyObject* break_off(const FastPath* fast_path, PyObject* source, PyObject* target, hc_handle number) {
  if (!hc_poll(fast_path->rt, number)) {
    const std::string text = interruption_by_what_is_set();
    WithoutGil released;
    hc_break_off(fast_path->rt, number, text.c_str());
  }
  if (!hc_poll(fast_path->rt, number)) {  // it would not end: then its tensors are never let go
    Py_INCREF(source);
    Py_INCREF(target);
  }
  hc_release(fast_path->rt, number);
  return nullptr;
}

enum class Outcome { kNotPlain, kDone, kHandle, kRaised };

// Submits and waits. kHandle: it failed, or the limit is over, and whoever waits for `*object` gets the error. kDone:
// *number is 0, or has a result to take and is to be released. kRaised: an exception is set.
Outcome wait_for(const FastPath* fast_path, const hc_request& request, const hc_tensor* tensors, int32_t n,
                 PyObject* source, PyObject* target, double limit_s, hc_handle* number, PyObject** object) {
  if (hc_status* status = hc_call(fast_path->rt, &request, tensors, n, number)) {
    hc_status_destroy(status);
    return Outcome::kNotPlain;
  }
  const Waited waited = *number == 0 ? Waited::kSucceeded : wait_in_slices(fast_path->rt, *number, limit_s);
  if (waited == Waited::kSucceeded) return Outcome::kDone;
  if (waited == Waited::kRaised) {
    *object = break_off(fast_path, source, target, *number);
    return Outcome::kRaised;
  }
  *object = remember(fast_path, source, target, *number);
  return *object ? Outcome::kHandle : Outcome::kRaised;
}

// The target, or, where it failed, the handle, of which `synchronize` raises the error.
PyObject* run(const FastPath* fast_path, PyObject* const* args, const hc_request& request,
              const PlainTensors& tensors) {
  hc_handle number = 0;
  PyObject* object = nullptr;
  switch (wait_for(fast_path, request, tensors.data(), tensors.count(), args[kSource], args[kTarget], 0, &number,
                   &object)) {
    case Outcome::kNotPlain:
      Py_RETURN_NONE;
    case Outcome::kDone:
      if (number != 0) hc_release(fast_path->rt, number);
      Py_INCREF(args[kTarget]);
      return args[kTarget];
    case Outcome::kHandle:
    case Outcome::kRaised:
      break;
  }
  return object;
}

PyObject* start_one(PyObject* self, PyObject* const* args, Py_ssize_t count, bool will_wait) {
  const auto* fast_path = reinterpret_cast<const FastPath*>(self);
  hc_request request{};
  PlainTensors tensors(fast_path->exchange);
  if (count != kCount || !read_request(fast_path, args, &request)) Py_RETURN_NONE;
  if (!read_tensors(fast_path, args[kSource], args[kTarget], &tensors)) Py_RETURN_NONE;
  return (will_wait ? run : submit)(fast_path, args, request, tensors);
}

PyObject* start(PyObject* self, PyObject* const* args, Py_ssize_t count) { return start_one(self, args, count, false); }
PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t count) { return start_one(self, args, count, true); }

bool is_listing(PyObject* object) { return PyList_CheckExact(object) || PyTuple_CheckExact(object); }

PyObject* start_group(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const auto* fast_path = reinterpret_cast<const FastPath*>(self);
  hc_request request{};
  if (count != kCount || !read_request(fast_path, args, &request)) Py_RETURN_NONE;
  PyObject *sources = args[kSource], *targets = args[kTarget];
  if (!is_listing(sources) || !is_listing(targets)) Py_RETURN_NONE;
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(sources);
  if (n == 0 || n > INT32_MAX || PySequence_Fast_GET_SIZE(targets) != n) Py_RETURN_NONE;
  PlainTensors tensors(fast_path->exchange);
  tensors.reserve(static_cast<size_t>(n));
  for (Py_ssize_t i = 0; i < n; ++i)
    if (!read_tensors(fast_path, PySequence_Fast_GET_ITEM(sources, i), PySequence_Fast_GET_ITEM(targets, i), &tensors))
      Py_RETURN_NONE;
  return submit(fast_path, args, request, tensors);
}

// The output of an operation that has succeeded already; NotImplemented: ask the slow path.
PyObject* finish(PyObject* self, PyObject* handle) {
  auto* fast_path = reinterpret_cast<FastPath*>(self);
  PyObject* kept = PyLong_CheckExact(handle) ? PyDict_GetItemWithError(fast_path->pending, handle) : nullptr;
  if (!kept) {
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NOTIMPLEMENTED;
  }
  PyObject* output = kept;
  if (PyTuple_CheckExact(kept)) {
    if (PyTuple_GET_ITEM(kept, 2) != Py_None) Py_RETURN_NOTIMPLEMENTED;
    output = PyTuple_GET_ITEM(kept, 0);
  }
  const hc_handle number = PyLong_AsLongLong(handle);
  if (!hc_finish(fast_path->rt, number)) Py_RETURN_NOTIMPLEMENTED;
  fast_path->given[fast_path->given_count++ % kGivenKept] = {number, this_thread()};
  Py_INCREF(output);
  if (PyDict_DelItem(fast_path->pending, handle) == 0) return output;
  Py_DECREF(output);
  return nullptr;
}

// Whether finish() has given this one's output to another thread, as far back as it is remembered.
PyObject* given_elsewhere(PyObject* self, PyObject* handle) {
  const auto* fast_path = reinterpret_cast<const FastPath*>(self);
  const hc_handle number = PyLong_CheckExact(handle) ? PyLong_AsLongLong(handle) : 0;
  if (number <= 0) PyErr_Clear();
  for (size_t i = 0; number > 0 && i < std::min(fast_path->given_count, kGivenKept); ++i)
    if (fast_path->given[i].handle == number) return PyBool_FromLong(fast_path->given[i].thread != this_thread());
  Py_RETURN_FALSE;
}

constexpr std::array<int64_t, HC_DTYPES> kBytesOf = [] {
  std::array<int64_t, HC_DTYPES> bytes{};
#define HC_BYTES(name, enumerator, text, size, ...) bytes[HC_##name] = size;
  HC_REDUCED_DTYPES(HC_BYTES)
#undef HC_BYTES
  return bytes;
}();

int64_t elements_of(const hc_tensor& t) {
  int64_t n = 1;
  for (int32_t d = 0; d < t.rank; ++d) n *= t.shape[d];
  return n;
}

bool overlap(const hc_tensor& a, int64_t a_bytes, const hc_tensor& b, int64_t b_bytes) {
  const auto from = reinterpret_cast<uintptr_t>(a.in), to = reinterpret_cast<uintptr_t>(b.in);
  return from < to + static_cast<uintptr_t>(b_bytes) && to < from + static_cast<uintptr_t>(a_bytes);
}

// The elements of each rank's part. rows: the parts' sizes along the first dimension; None or an empty list: equal
// parts, for which `parts` stays empty. False: they are not the tensor's.
bool read_parts(PyObject* rows, const hc_tensor& t, int64_t size, std::vector<int64_t>* parts) {
  if (t.rank == 0) return false;
  if (rows == Py_None || (is_listing(rows) && PySequence_Fast_GET_SIZE(rows) == 0)) return t.shape[0] % size == 0;
  if (!is_listing(rows) || PySequence_Fast_GET_SIZE(rows) != size) return false;
  const int64_t row = elements_of(t) / t.shape[0];
  int64_t left = t.shape[0];
  for (Py_ssize_t i = 0; i < size; ++i) {
    int32_t count = 0;
    if (!read_int(PySequence_Fast_GET_ITEM(rows, i), 0, INT32_MAX, &count)) return false;
    left -= count;
    parts->push_back(count * row);
  }
  return left == 0;
}

enum : Py_ssize_t { kOp, kFrom, kTo, kHow, kRoot, kTag, kRows, kAwaited, kCollectiveCount };

// An operation of c10d: its arguments, and its tensor where it has one.
struct Collective {
  hc_request request{};
  int64_t shape[2] = {};
  hc_tensor tensor{};
  bool has_tensor = false;
  std::vector<int64_t> splits, awaited;

  // False: not plain.
  bool read(const FastPath* fast_path, PyObject* const* args, Py_ssize_t count) {
    int32_t tag = 0;
    request.version = HC_VERSION;
    request.device_index = -1;
    request.prescale = request.postscale = 1;
    if ((count != kRows && count != kCollectiveCount) || !read_int(args[kOp], 0, HC_RECEIVE, &request.op) ||
        !read_int(args[kHow], 0, HC_REDUCTIONS - 1, &request.reduce) ||
        !read_int(args[kRoot], 0, INT32_MAX, &request.root) || !read_int(args[kTag], 0, INT32_MAX, &tag))
      return false;
    request.tag = tag;
    has_tensor = request.op != HC_BARRIER;
    if (!has_tensor) return true;
    const bool has_rows = count == kCollectiveCount;
    return describe(fast_path, args[kFrom], args[kTo], has_rows ? args[kRows] : Py_None,
                    has_rows ? args[kAwaited] : Py_None);
  }
  const hc_tensor* data() const { return has_tensor ? &tensor : nullptr; }

 private:
  // Shows the tensors to the core as the slow path does (c10d/group.py): what is reduced and messages as they are, what
  // is moved as one row, what is scattered as a row for each rank. False: not plain.
  bool describe(const FastPath* fast_path, PyObject* source, PyObject* target, PyObject* rows, PyObject* awaited_rows) {
    PlainTensors tensors(fast_path->exchange);
    const int32_t op = request.op;
    if (!fast_path->exchange) return false;
    if (op == HC_SEND || op == HC_RECEIVE) {
      PyObject* const given = op == HC_SEND ? source : target;
      if (!is_one_of(fast_path->kinds, given) || !tensors.read(given, op == HC_RECEIVE, &tensor)) return false;
      if (op == HC_SEND)
        tensor.out = nullptr;
      else
        tensor.in = nullptr;
      return true;
    }
    if (!is_one_of(fast_path->kinds, source) || !tensors.read(source, false, &tensor)) return false;
    hc_tensor to = tensor;
    if (target == Py_None)
      to.out = nullptr;
    else if (source != target && (!is_one_of(fast_path->kinds, target) || !tensors.read(target, true, &to)))
      return false;
    if (op == HC_REDUCE || op == HC_GATHER) {  // the root alone has a result
      if ((target != Py_None) != (request.root == hc_get(fast_path->rt, HC_RANK))) return false;
    } else if (target == Py_None) {
      return false;
    }
    tensor.out = to.out;
    if (op == HC_ALLREDUCE || op == HC_REDUCE) return source == target || target == Py_None;
    return op == HC_BROADCAST ? source == target && move(elements_of(tensor))
                              : describe_parts(to, hc_get(fast_path->rt, HC_SIZE), rows, awaited_rows);
  }

  // to: the target; without memory: there is none.
  bool describe_parts(const hc_tensor& to, int64_t size, PyObject* rows, PyObject* awaited_rows) {
    const int64_t given = elements_of(tensor), wanted = elements_of(to),
                  bytes_of_one = kBytesOf[static_cast<size_t>(tensor.dtype)];
    if (to.out && (tensor.dtype != to.dtype || overlap(tensor, given * bytes_of_one, to, wanted * bytes_of_one)))
      return false;
    if (request.op == HC_ALLGATHER || request.op == HC_GATHER)
      return (!to.out || wanted == size * given) && move(given);
    if (request.op == HC_ALLTOALL) {
      if (!read_parts(rows, tensor, size, &splits) || !read_parts(awaited_rows, to, size, &awaited)) return false;
      const auto are_equal = [](const std::vector<int64_t>& parts) {
        return std::all_of(parts.begin(), parts.end(), [&](int64_t part) { return part == parts[0]; });
      };
      if (given != wanted || !are_equal(splits) || !are_equal(awaited)) {
        if (splits.empty()) splits.assign(static_cast<size_t>(size), given / size);
        if (awaited.empty()) awaited.assign(static_cast<size_t>(size), wanted / size);
        request.splits = splits.data();
        request.awaited = awaited.data();
        request.split_count = request.awaited_count = static_cast<int32_t>(size);
      }
      return move(given);
    }
    if (request.op != HC_REDUCESCATTER || given != size * wanted) return false;
    shape[0] = size;
    shape[1] = wanted;
    tensor.shape = shape;
    tensor.rank = 2;
    return true;
  }

  // As one row.
  bool move(int64_t elements) {
    shape[0] = elements;
    tensor.shape = shape;
    tensor.rank = 1;
    return true;
  }
};

// collective(op, source, target, reduce, root, tag[, rows, awaited_rows]): waits. True: done. A handle: it failed, the
// limit is over, or the core owns the result, because the ranks' sizes differ. None: not plain. A barrier has no
// tensors: None twice; a message has one, and so has who gives to the root of a reduce or gather. rows: how an alltoall
// cuts the source, awaited_rows: of whom the target's rows are to come; None: in equal parts.
PyObject* collective(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const auto* fast_path = reinterpret_cast<const FastPath*>(self);
  Collective call;
  if (!call.read(fast_path, args, count)) Py_RETURN_NONE;
  hc_handle number = 0;
  PyObject* object = nullptr;
  switch (wait_for(fast_path, call.request, call.data(), call.has_tensor, args[kFrom], args[kTo], fast_path->limit_s,
                   &number, &object)) {
    case Outcome::kNotPlain:
      Py_RETURN_NONE;
    case Outcome::kDone:
      if (number != 0 && !hc_has_no_result(fast_path->rt, number))
        return remember(fast_path, args[kFrom], args[kTo], number);
      if (number != 0) hc_release(fast_path->rt, number);
      Py_RETURN_TRUE;
    case Outcome::kHandle:
    case Outcome::kRaised:
      break;
  }
  return object;
}

// The same without the wait. True: done already. A handle: under way; the caller keeps the tensors.
PyObject* start_collective(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  const auto* fast_path = reinterpret_cast<const FastPath*>(self);
  Collective call;
  if (!call.read(fast_path, args, count)) Py_RETURN_NONE;
  hc_handle number = 0;
  if (hc_status* status = hc_start(fast_path->rt, &call.request, call.data(), call.has_tensor, &number)) {
    hc_status_destroy(status);
    Py_RETURN_NONE;
  }
  if (number == 0) Py_RETURN_TRUE;
  return PyLong_FromLongLong(number);
}

// Waits for what start_collective() has given a handle of. True: it has succeeded, and its handle is released. False:
// there is an error to raise or a result to take.
PyObject* end_collective(PyObject* self, PyObject* handle) {
  const auto* fast_path = reinterpret_cast<const FastPath*>(self);
  const hc_handle number = PyLong_AsLongLong(handle);
  if (number == -1 && PyErr_Occurred()) return nullptr;
  bool has_ended = hc_has_no_result(fast_path->rt, number);
  if (!has_ended) {
    if (wait_in_slices(fast_path->rt, number, 0) == Waited::kRaised) return nullptr;
    has_ended = hc_has_no_result(fast_path->rt, number);
  }
  return PyBool_FromLong(has_ended && hc_finish(fast_path->rt, number));
}

PyObject* set_limit(PyObject* self, PyObject* limit_s) {
  const double seconds = PyFloat_AsDouble(limit_s);
  if (seconds == -1 && PyErr_Occurred()) return nullptr;
  reinterpret_cast<FastPath*>(self)->limit_s = seconds;
  Py_RETURN_NONE;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *runtime, *kinds, *capsule, *everybody, *pending;
  if (!PyArg_ParseTuple(args, "OO!OOO!", &runtime, &PyTuple_Type, &kinds, &capsule, &everybody, &PyDict_Type, &pending))
    return nullptr;
  const DlExchange* exchange = nullptr;
  if (capsule != Py_None) {
    exchange = static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule, kDlExchangeName));
    if (!exchange) return nullptr;
    while (exchange && exchange->major != 1) exchange = exchange->previous;
    if (!exchange || !exchange->read) {
      PyErr_SetString(PyExc_NotImplementedError, "DLPack's functions of version 1 are not there");
      return nullptr;
    }
  }
  PyObject* address = PyObject_GetAttrString(runtime, "address");
  void* rt = address ? PyLong_AsVoidPtr(address) : nullptr;
  Py_XDECREF(address);
  if (!rt) return nullptr;
  auto* fast_path = reinterpret_cast<FastPath*>(type->tp_alloc(type, 0));
  if (!fast_path) return nullptr;
  fast_path->rt = static_cast<hc_runtime*>(rt);
  fast_path->exchange = exchange;
  for (PyObject* kept : {fast_path->runtime = runtime, fast_path->kinds = kinds, fast_path->capsule = capsule,
                        fast_path->everybody = everybody, fast_path->pending = pending})
    Py_INCREF(kept);
  return reinterpret_cast<PyObject*>(fast_path);
}

void unmake(PyObject* self) {
  auto* fast_path = reinterpret_cast<FastPath*>(self);
  PyTypeObject* type = Py_TYPE(self);
  for (PyObject* kept :
       {fast_path->runtime, fast_path->kinds, fast_path->capsule, fast_path->everybody, fast_path->pending})
    Py_XDECREF(kept);
  type->tp_free(self);
  Py_DECREF(type);
}

template <class Function>
PyCFunction fast(Function* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace

void add_fast_path(py::module_& m) {
  static PyMethodDef methods[] = {{"start", fast(start), METH_FASTCALL, nullptr},
                                  {"call", fast(call), METH_FASTCALL, nullptr},
                                  {"start_group", fast(start_group), METH_FASTCALL, nullptr},
                                  {"collective", fast(collective), METH_FASTCALL, nullptr},
                                  {"start_collective", fast(start_collective), METH_FASTCALL, nullptr},
                                  {"end_collective", end_collective, METH_O, nullptr},
                                  {"set_limit", set_limit, METH_O, nullptr},
                                  {"finish", finish, METH_O, nullptr},
                                  {"given_elsewhere", given_elsewhere, METH_O, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(unmake)},
                                {Py_tp_methods, methods},
                                {0, nullptr}};
  static PyType_Spec spec = {"horoclone._core.FastPath", sizeof(FastPath), 0, Py_TPFLAGS_DEFAULT, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (!type) throw py::error_already_set();
  m.attr("FastPath") = py::reinterpret_steal<py::object>(type);
}

}  // namespace hc_python
