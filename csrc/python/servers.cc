// Tables, servers and clients of a parameter server, on addresses whose memory the caller keeps. The GIL is
// released wherever the core works or waits; no thread of a server ever takes it.
#include "servers.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "horoclone_server.h"
#include "interruption.h"
#include "raising.h"
#include "without_gil.h"

namespace py = pybind11;

namespace hc_python {
namespace {

const int64_t* ids_at(uintptr_t address) { return reinterpret_cast<const int64_t*>(address); }
const float* floats_at(uintptr_t address) { return reinterpret_cast<const float*>(address); }

template <class Work>
void without_gil(Work&& work) {
  hc_status* status;
  {
    WithoutGil released;
    status = work();
  }
  raise_if(status);
}

// A TableSpec of _core.pyi; the name lives in `name`.
hc_table_spec spec_of(const py::dict& given, std::string* name) {
  *name = given["name"].cast<std::string>();
  hc_table_spec spec{};
  spec.version = HC_VERSION;
  spec.name = name->c_str();
  spec.dim = given["dim"].cast<uint32_t>();
  spec.rule = given["rule"].cast<int32_t>();
  spec.dense = given["dense"].cast<bool>();
  spec.learning_rate = given["learning_rate"].cast<float>();
  spec.epsilon = given["epsilon"].cast<float>();
  spec.beta1 = given["beta1"].cast<float>();
  spec.beta2 = given["beta2"].cast<float>();
  spec.initial_accumulator = given["initial_accumulator"].cast<float>();
  spec.initial = given["initial"].cast<int32_t>();
  spec.spread = given["spread"].cast<float>();
  spec.seed = given["seed"].cast<uint64_t>();
  spec.workers = given["workers"].cast<int32_t>();
  spec.staleness = given["staleness"].cast<int32_t>();
  spec.average = given["average"].cast<bool>();
  return spec;
}

uint32_t state_of(const py::dict& given) {
  std::string name;
  const hc_table_spec spec = spec_of(given, &name);
  return hc_table_state(&spec);
}

class Table {
 public:
  Table(const py::dict& given, uint64_t memory) {
    std::string name;
    const hc_table_spec spec = spec_of(given, &name);
    raise_if(hc_table_create(&spec, memory, &table_));
  }
  ~Table() { hc_table_destroy(table_); }
  Table(const Table&) = delete;
  Table& operator=(const Table&) = delete;
  uint64_t rows() const { return hc_table_rows(table_); }
  void pull(uintptr_t ids, size_t n, uintptr_t out) {
    without_gil([&] { return hc_table_pull(table_, ids_at(ids), n, reinterpret_cast<float*>(out)); });
  }
  void push(uintptr_t ids, size_t n, uintptr_t gradients) {
    without_gil([&] { return hc_table_push(table_, ids_at(ids), n, floats_at(gradients)); });
  }
  void assign(uintptr_t ids, size_t n, uintptr_t rows, bool with_state) {
    without_gil([&] { return hc_table_assign(table_, ids_at(ids), n, floats_at(rows), with_state); });
  }

 private:
  hc_table* table_ = nullptr;
};

class Server {
 public:
  Server(int index, uint32_t partitions, const std::string& secret, const std::string& job, uint64_t generation,
         uint64_t memory, double silence_s, const std::string& interfaces) {
    const hc_server_options options{HC_VERSION,    index,
                                    partitions,    reinterpret_cast<const uint8_t*>(secret.data()),
                                    secret.size(), job.c_str(),
                                    generation,    memory,
                                    silence_s,     interfaces.c_str()};
    without_gil([&] { return hc_server_start(&options, &server_); });
  }
  ~Server() {
    WithoutGil released;
    hc_server_destroy(server_);
  }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  py::bytes endpoint() const {
    size_t bytes = 0;
    const uint8_t* data = hc_server_endpoint(server_, &bytes);
    return {reinterpret_cast<const char*>(data), bytes};
  }
  void set_role(uint32_t partition, int role) {
    without_gil([&] { return hc_server_set_role(server_, partition, role); });
  }
  int role(uint32_t partition) const { return hc_server_role(server_, partition); }
  void attach(uint32_t partition, const std::string& endpoint, int index, uint64_t generation, double timeout_s) {
    without_gil([&] {
      return hc_server_attach(server_, partition, reinterpret_cast<const uint8_t*>(endpoint.data()), endpoint.size(),
                              index, generation, timeout_s);
    });
  }
  void detach(uint32_t partition) {
    without_gil([&] { return hc_server_detach(server_, partition); });
  }
  py::object next_event(double timeout_s) {
    hc_event event{};
    int32_t found;
    {
      WithoutGil released;
      found = hc_server_next_event(server_, timeout_s, &event);
    }
    if (!found) return py::none();
    return py::make_tuple(event.number, event.kind, event.partition, py::str(event.text));
  }
  void answer(uint64_t number, int code, const std::string& text) {
    hc_server_answer(server_, number, code, text.c_str());
  }
  py::tuple rows(uint32_t partition, const std::string& table, uint64_t from, size_t n, uintptr_t ids, uintptr_t out) {
    size_t rows = 0;
    uint64_t steps = 0;
    without_gil([&] {
      return hc_server_rows(server_, partition, table.c_str(), &from, n, reinterpret_cast<int64_t*>(ids),
                            reinterpret_cast<float*>(out), &rows, &steps);
    });
    return py::make_tuple(rows, steps);
  }
  std::string describe() const {
    WithoutGil released;
    return hc_server_describe(server_);
  }
  void stop() {
    WithoutGil released;
    hc_server_stop(server_);
  }

 private:
  hc_server* server_ = nullptr;
};

class Call {
 public:
  Call(hc_exchange* call, uint32_t partitions) : call_(call), partitions_(partitions) {}
  ~Call() { hc_exchange_destroy(call_); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  hc_exchange* get() const { return call_; }
  std::vector<int64_t> clocks() const {
    const int64_t* at = hc_exchange_clocks(call_);
    return {at, at + partitions_};
  }
  void set_clocks(const std::vector<int64_t>& clocks) {
    if (clocks.size() != partitions_) throw py::value_error("one clock for each partition");
    std::copy(clocks.begin(), clocks.end(), hc_exchange_clocks(call_));
  }

 private:
  hc_exchange* call_;
  uint32_t partitions_;
};

// Whether Ctrl-C was pressed; the exception waits for run().
int32_t was_interrupted(void* context) {
  const py::gil_scoped_acquire held;
  if (PyErr_CheckSignals() == 0) return 0;
  *static_cast<std::unique_ptr<py::error_already_set>*>(context) = std::make_unique<py::error_already_set>();
  return 1;
}

class Client {
 public:
  Client(int rank, uint64_t worker, uint32_t partitions, const std::string& secret, const std::string& job,
         double silence_s)
      : partitions_(partitions) {
    const hc_client_options options{
        HC_VERSION,    rank,        worker,   partitions, reinterpret_cast<const uint8_t*>(secret.data()),
        secret.size(), job.c_str(), silence_s};
    raise_if(hc_client_create(&options, &client_));
  }
  ~Client() { close(); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  void close() {
    WithoutGil released;
    hc_client_destroy(std::exchange(client_, nullptr));
  }

  void connect(const std::string& endpoint, int index, uint64_t generation, double timeout_s) {
    without_gil([&] {
      return hc_client_connect(open(), reinterpret_cast<const uint8_t*>(endpoint.data()), endpoint.size(), index,
                               generation, timeout_s);
    });
  }
  bool is_connected(int server) { return hc_client_is_connected(open(), server) != 0; }
  void route(uint32_t partition, int server) { raise_if(hc_client_route(open(), partition, server)); }
  py::str ask(int server, const std::string& question, double timeout_s) {
    std::string answer;
    hc_client* client = open();
    without_gil([&] {
      const char* text = "";
      hc_status* status = hc_client_ask(client, server, question.c_str(), timeout_s, &text);
      answer = text;
      return status;
    });
    return answer;
  }
  std::unique_ptr<Call> rows(int verb, const std::string& table, uintptr_t ids, size_t n, uint32_t floats, uintptr_t in,
                             uintptr_t out, uint32_t flags) {
    hc_exchange* call = nullptr;
    hc_client* client = open();
    without_gil([&] {
      return hc_exchange_rows(client, verb, table.c_str(), flags, ids_at(ids), n, floats, floats_at(in),
                              reinterpret_cast<float*>(out), &call);
    });
    return std::make_unique<Call>(call, partitions_);
  }
  std::unique_ptr<Call> make_table(const py::dict& given) {
    std::string name;
    const hc_table_spec spec = spec_of(given, &name);
    hc_exchange* call = nullptr;
    raise_if(hc_exchange_table(open(), &spec, &call));
    return std::make_unique<Call>(call, partitions_);
  }
  std::unique_ptr<Call> enter(const std::string& table, int rank) {
    hc_exchange* call = nullptr;
    raise_if(hc_exchange_register(open(), table.c_str(), rank, &call));
    return std::make_unique<Call>(call, partitions_);
  }
  // (partition, server, retry, code, text) of what is not done
  std::vector<std::tuple<uint32_t, int, bool, int, std::string>> run(Call& call, double limit_s) {
    const hc_failure* failures = nullptr;
    size_t n = 0;
    std::unique_ptr<py::error_already_set> interrupted;
    hc_client* client = open();
    {
      WithoutGil released;
      hc_exchange_run(client, call.get(), limit_s, was_interrupted, &interrupted, &failures, &n);
    }
    if (interrupted) throw std::move(*interrupted);
    std::vector<std::tuple<uint32_t, int, bool, int, std::string>> found;
    for (size_t i = 0; i < n; ++i)
      found.emplace_back(failures[i].partition, failures[i].server, failures[i].retry != 0, failures[i].code,
                         failures[i].text);
    return found;
  }

 private:
  hc_client* open() const {
    if (!client_) throw py::value_error("the connection to the servers is closed");
    return client_;
  }
  hc_client* client_ = nullptr;
  const uint32_t partitions_;
};

}  // namespace

void add_servers(py::module_& m) {
  using namespace py::literals;
  m.def("table_state", &state_of, "spec"_a);
  m.def("raise_code", [](int code, const std::string& text) { raise(code, -1, text); }, "code"_a, "text"_a);
  py::class_<Table>(m, "Table")
      .def(py::init<const py::dict&, uint64_t>(), "spec"_a, "memory"_a)
      .def_property_readonly("rows", &Table::rows)
      .def("pull", &Table::pull, "ids"_a, "n"_a, "out"_a)
      .def("push", &Table::push, "ids"_a, "n"_a, "gradients"_a)
      .def("assign", &Table::assign, "ids"_a, "n"_a, "rows"_a, "with_state"_a = false);
  py::class_<Server>(m, "ParameterServer")
      .def(py::init<int, uint32_t, const std::string&, const std::string&, uint64_t, uint64_t, double,
                    const std::string&>(),
           "index"_a, "partitions"_a, "secret"_a, "job"_a, "generation"_a, "memory"_a, "silence_s"_a, "interfaces"_a)
      .def("endpoint", &Server::endpoint)
      .def("set_role", &Server::set_role, "partition"_a, "role"_a)
      .def("role", &Server::role, "partition"_a)
      .def("attach", &Server::attach, "partition"_a, "endpoint"_a, "index"_a, "generation"_a, "timeout_s"_a)
      .def("detach", &Server::detach, "partition"_a)
      .def("next_event", &Server::next_event, "timeout_s"_a)
      .def("answer", &Server::answer, "number"_a, "code"_a, "text"_a)
      .def("rows", &Server::rows, "partition"_a, "table"_a, "start"_a, "n"_a, "ids"_a, "out"_a)
      .def("describe", &Server::describe)
      .def("stop", &Server::stop);
  py::class_<Call>(m, "ParameterCall").def_property("clocks", &Call::clocks, &Call::set_clocks);
  py::class_<Client>(m, "ParameterClient")
      .def(py::init<int, uint64_t, uint32_t, const std::string&, const std::string&, double>(), "rank"_a, "worker"_a,
           "partitions"_a, "secret"_a, "job"_a, "silence_s"_a)
      .def("connect", &Client::connect, "endpoint"_a, "index"_a, "generation"_a, "timeout_s"_a)
      .def("is_connected", &Client::is_connected, "server"_a)
      .def("route", &Client::route, "partition"_a, "server"_a)
      .def("ask", &Client::ask, "server"_a, "question"_a, "timeout_s"_a)
      .def("rows", &Client::rows, "verb"_a, "table"_a, "ids"_a, "n"_a, "floats"_a, "data_in"_a = 0, "data_out"_a = 0,
           "flags"_a = 0)
      .def("make_table", &Client::make_table, "spec"_a)
      .def("enter", &Client::enter, "table"_a, "rank"_a)
      .def("run", &Client::run, "call"_a, "limit_s"_a)
      .def("close", &Client::close);
}

}  // namespace hc_python
