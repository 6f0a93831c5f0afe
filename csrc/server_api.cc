// The C API of parameter servers: checks, unwraps, calls csrc/server, wraps the status. Nothing is decided here.
#include <string>
#include <utility>
#include <vector>

#include "c_api.h"
#include "horoclone_server.h"
#include "server/client.h"
#include "server/server.h"

struct hc_table {
  hc_table(hc::TableSpec spec, size_t memory) : budget(memory), table(std::move(spec), &budget) {}
  hc::MemoryBudget budget;
  hc::Table table;
};
struct hc_server {
  std::unique_ptr<hc::Server> server;
  std::string endpoint;
};
struct hc_client {
  explicit hc_client(hc::ClientOptions options) : client(std::move(options)) {}
  hc::Client client;
};
struct hc_exchange {
  template <class... Arguments>
  explicit hc_exchange(Arguments&&... arguments) : call(std::forward<Arguments>(arguments)...) {}
  hc::Call call;
  std::vector<hc::Failure> failures;
  std::vector<hc_failure> listed;
};

using hc::guarded;
using hc::keep;

namespace {

static_assert(static_cast<int>(hc::Rule::kAdam) == HC_RULE_ADAM &&
              static_cast<int>(hc::Initial::kNormal) == HC_NORMAL &&
              static_cast<int>(hc::Role::kUndecided) == HC_ROLE_UNDECIDED &&
              static_cast<int>(hc::EventKind::kPrimaryLost) == HC_PRIMARY_LOST);

hc::Result<hc::TableSpec> read_spec(const hc_table_spec& s) {
  if (s.version != HC_VERSION) return hc::error(hc::Code::kInvalidArgument, "table version ", s.version);
  hc::TableSpec spec;
  spec.name = s.name ? s.name : "";
  spec.dim = s.dim;
  spec.optimizer = {static_cast<hc::Rule>(s.rule), s.dense != 0, s.learning_rate, s.epsilon, s.beta1, s.beta2,
                    s.initial_accumulator};
  spec.initial = static_cast<hc::Initial>(s.initial);
  spec.spread = s.spread;
  spec.seed = s.seed;
  spec.workers = s.workers;
  spec.staleness = s.staleness;
  spec.average = s.average != 0;
  HC_TRY(spec.check());
  return spec;
}

hc::Credentials credentials(const uint8_t* secret, size_t bytes, const char* job) {
  return {std::string(reinterpret_cast<const char*>(secret), bytes), job ? job : ""};
}

hc::Result<hc::Connection::Target> target(const uint8_t* endpoint, size_t bytes, int32_t index, uint64_t generation) {
  auto read = hc::Endpoint::decode(std::string(reinterpret_cast<const char*>(endpoint), bytes));
  if (!read.is_ok()) return read.status();
  return hc::Connection::Target{read.take(), index, generation};
}

}  // namespace

extern "C" {

hc_status* hc_table_create(const hc_table_spec* spec, size_t memory_bytes, hc_table** out) {
  return guarded([&]() -> hc::Status {
    auto read = read_spec(*spec);
    if (!read.is_ok()) return read.status();
    *out = new hc_table(read.take(), memory_bytes);
    return hc::Status::ok();
  });
}
void hc_table_destroy(hc_table* table) { delete table; }
uint32_t hc_table_state(const hc_table_spec* spec) {
  auto read = read_spec(*spec);
  return read.is_ok() ? static_cast<uint32_t>(read.value().row_floats() - read.value().dim) : 0;
}
uint64_t hc_table_rows(const hc_table* table) { return table->table.rows(); }
hc_status* hc_table_pull(const hc_table* table, const int64_t* ids, size_t n, float* out) {
  return guarded([&] {
    table->table.read({ids, n}, out);
    return hc::Status::ok();
  });
}
hc_status* hc_table_push(hc_table* table, const int64_t* ids, size_t n, const float* gradients) {
  return guarded([&]() -> hc::Status {
    std::vector<uint32_t> slots;
    HC_TRY(table->table.find_or_make({ids, n}, &slots));
    table->table.reserve_step(n);
    const hc::Table::Gradients one{slots, gradients};
    table->table.update({&one, 1}, 1.0f);
    return hc::Status::ok();
  });
}
hc_status* hc_table_assign(hc_table* table, const int64_t* ids, size_t n, const float* rows, int32_t with_state) {
  return guarded([&] { return table->table.set_rows({ids, n}, rows, with_state != 0, false); });
}

hc_status* hc_server_start(const hc_server_options* o, hc_server** out) {
  return guarded([&]() -> hc::Status {
    if (o->version != HC_VERSION) return hc::error(hc::Code::kInvalidArgument, "server version ", o->version);
    hc::ServerOptions options{credentials(o->secret, o->secret_bytes, o->job),
                              o->index,
                              o->partitions,
                              o->generation,
                              o->memory_bytes,
                              o->silence_s,
                              o->interfaces ? o->interfaces : ""};
    auto server = hc::Server::start(std::move(options));
    if (!server.is_ok()) return server.status();
    auto made = std::make_unique<hc_server>();
    made->server = server.take();
    made->endpoint = made->server->endpoint();
    *out = made.release();
    return hc::Status::ok();
  });
}
void hc_server_stop(hc_server* server) { server->server->stop(); }
void hc_server_destroy(hc_server* server) { delete server; }
const uint8_t* hc_server_endpoint(const hc_server* server, size_t* bytes) {
  *bytes = server->endpoint.size();
  return reinterpret_cast<const uint8_t*>(server->endpoint.data());
}
hc_status* hc_server_set_role(hc_server* server, uint32_t partition, int32_t role) {
  return guarded([&]() -> hc::Status {
    if (role < 0 || role >= hc::kRoleCount) return hc::error(hc::Code::kInvalidArgument, "unknown role ", role);
    return server->server->set_role(partition, static_cast<hc::Role>(role));
  });
}
int32_t hc_server_role(hc_server* server, uint32_t partition) {
  auto found = server->server->partition(partition);
  return found.is_ok() ? static_cast<int32_t>(found.value()->role()) : HC_ROLE_NONE;
}
hc_status* hc_server_attach(hc_server* server, uint32_t partition, const uint8_t* endpoint, size_t bytes, int32_t index,
                            uint64_t generation, double timeout_s) {
  return guarded([&]() -> hc::Status {
    auto to = target(endpoint, bytes, index, generation);
    if (!to.is_ok()) return to.status();
    return server->server->attach(partition, to.value(), timeout_s);
  });
}
hc_status* hc_server_detach(hc_server* server, uint32_t partition) {
  return guarded([&]() -> hc::Status {
    auto found = server->server->partition(partition);
    if (!found.is_ok()) return found.status();
    found.value()->detach();
    return hc::Status::ok();
  });
}
int32_t hc_server_next_event(hc_server* server, double timeout_s, hc_event* event) {
  hc::Event next;
  if (!server->server->events().next(timeout_s, &next)) return 0;
  *event = {next.number, static_cast<int32_t>(next.kind), next.partition, keep(std::move(next.text))};
  return 1;
}
void hc_server_answer(hc_server* server, uint64_t number, int32_t code, const char* text) {
  const auto kind = static_cast<hc::Code>(code);
  server->server->events().answer(number, kind == hc::Code::kOk ? hc::Status::ok() : hc::Status(kind, text), text);
}
hc_status* hc_server_rows(hc_server* server, uint32_t partition, const char* table, uint64_t* from, size_t n,
                          int64_t* ids, float* out, size_t* rows, uint64_t* steps) {
  return guarded([&]() -> hc::Status {
    auto found = server->server->partition(partition);
    if (!found.is_ok()) return found.status();
    size_t start = *from;
    *rows = found.value()->copy_rows(hc::table_hash(table), start, n, ids, out, steps);
    *from = start + *rows;
    return hc::Status::ok();
  });
}
const char* hc_server_describe(hc_server* server) { return keep(server->server->describe()); }

hc_status* hc_client_create(const hc_client_options* o, hc_client** out) {
  return guarded([&]() -> hc::Status {
    if (o->version != HC_VERSION) return hc::error(hc::Code::kInvalidArgument, "client version ", o->version);
    if (o->worker == 0 || o->partitions < 1 || o->rank < 0)
      return hc::error(hc::Code::kInvalidArgument, "worker ", o->worker, ", rank ", o->rank, ", ", o->partitions,
                       " partitions");
    *out = new hc_client(hc::ClientOptions{credentials(o->secret, o->secret_bytes, o->job), o->worker, o->rank,
                                           o->silence_s, o->partitions});
    return hc::Status::ok();
  });
}
void hc_client_destroy(hc_client* client) { delete client; }
hc_status* hc_client_connect(hc_client* client, const uint8_t* endpoint, size_t bytes, int32_t index,
                             uint64_t generation, double timeout_s) {
  return guarded([&]() -> hc::Status {
    auto to = target(endpoint, bytes, index, generation);
    if (!to.is_ok()) return to.status();
    return client->client.connect(to.value(), timeout_s);
  });
}
int32_t hc_client_is_connected(const hc_client* client, int32_t server) { return client->client.is_connected(server); }
hc_status* hc_client_route(hc_client* client, uint32_t partition, int32_t server) {
  return guarded([&] {
    client->client.route(partition, server);
    return hc::Status::ok();
  });
}
hc_status* hc_client_ask(hc_client* client, int32_t server, const char* question, double timeout_s,
                         const char** answer) {
  return guarded([&]() -> hc::Status {
    std::string text;
    HC_TRY(client->client.ask(server, question, timeout_s, &text));
    *answer = keep(std::move(text));
    return hc::Status::ok();
  });
}

hc_status* hc_exchange_rows(const hc_client* client, int32_t verb, const char* table, uint32_t flags,
                            const int64_t* ids, size_t n, uint32_t floats, const float* in, float* out,
                            hc_exchange** call) {
  return guarded([&]() -> hc::Status {
    constexpr hc::Verb verbs[] = {hc::Verb::kPull, hc::Verb::kPush, hc::Verb::kAssign, hc::Verb::kRows};
    if (verb < HC_PULL || verb > HC_ROWS) return hc::error(hc::Code::kInvalidArgument, "unknown verb ", verb);
    if (n >= UINT32_MAX) return hc::error(hc::Code::kInvalidArgument, n, " rows in one call");
    *call = new hc_exchange(verbs[verb], client->client.partitions(), hc::table_hash(table), flags,
                            hc::Call::Rows{{ids, n}, floats, in, out});
    return hc::Status::ok();
  });
}
hc_status* hc_exchange_table(const hc_client* client, const hc_table_spec* spec, hc_exchange** call) {
  return guarded([&]() -> hc::Status {
    auto read = read_spec(*spec);
    if (!read.is_ok()) return read.status();
    hc::Writer payload;
    read.value().write(&payload);
    *call = new hc_exchange(hc::Verb::kTable, client->client.partitions(), hc::table_hash(spec->name),
                            std::vector<uint8_t>(payload.bytes().begin(), payload.bytes().end()));
    return hc::Status::ok();
  });
}
hc_status* hc_exchange_register(const hc_client* client, const char* table, int32_t rank, hc_exchange** call) {
  return guarded([&]() -> hc::Status {
    hc::Writer payload;
    payload.put(rank);
    *call = new hc_exchange(hc::Verb::kRegister, client->client.partitions(), hc::table_hash(table),
                            std::vector<uint8_t>(payload.bytes().begin(), payload.bytes().end()));
    return hc::Status::ok();
  });
}
void hc_exchange_destroy(hc_exchange* call) { delete call; }
int64_t* hc_exchange_clocks(hc_exchange* call) { return call->call.clocks().data(); }
void hc_exchange_run(hc_client* client, hc_exchange* call, double limit_s, int32_t (*cancelled)(void*), void* context,
                     const hc_failure** failures, size_t* n) {
  hc_status* status = guarded([&] {
    call->failures = client->client.run(call->call, limit_s, [&] { return cancelled && cancelled(context) != 0; });
    return hc::Status::ok();
  });
  if (status) {  // without memory: nothing is known to be done
    call->failures.assign(1, {0, -1, false, status->status});
    hc_status_destroy(status);
  }
  call->listed.clear();
  for (const hc::Failure& one : call->failures)
    call->listed.push_back(
        {one.partition, one.server, one.retry, static_cast<int32_t>(one.status.code()), one.status.text().c_str()});
  *failures = call->listed.data();
  *n = call->listed.size();
}

}  // extern "C"
