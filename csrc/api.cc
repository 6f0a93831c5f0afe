// The C API of the engine: checks, unwraps, calls the engine, wraps the status. Nothing is decided here.
#include <cstring>
#include <utility>

#include "base/log_lines.h"
#include "base/quoted.h"
#include "c_api.h"
#include "engine/engine.h"
#include "horoclone_tools.h"

struct hc_block {
  std::shared_ptr<hc::Memory> memory;
};
struct hc_runtime {
  std::unique_ptr<hc::Engine> engine;
  std::string endpoint;
};

using hc::guarded;
using hc::keep;
using hc::settings_of;
using hc::wrap;

namespace {

static_assert(static_cast<int>(hc::Code::kInternal) == HC_INTERNAL &&
              static_cast<int>(hc::Op::kReceive) == HC_RECEIVE && static_cast<int>(hc::Reduce::kXor) == HC_XOR &&
              hc::kReduceCount == HC_REDUCTIONS);

// A call's tensors as the engine takes them. Most calls have one, for which no memory is allocated.
class Tensors {
 public:
  explicit Tensors(int32_t n) : many_(n > 1 ? static_cast<size_t>(n) : 0) {}
  hc::Submission::Tensor& operator[](size_t i) { return many_.empty() ? one_ : many_[i]; }
  std::span<const hc::Submission::Tensor> first(int32_t n) const {
    return {many_.empty() ? &one_ : many_.data(), static_cast<size_t>(n)};
  }

 private:
  hc::Submission::Tensor one_{};
  std::vector<hc::Submission::Tensor> many_;
};

hc::Status read_request(const hc_request& r, const hc_tensor* tensors, int32_t n, Tensors* out, hc::Submission* s) {
  using hc::Code;
  if (r.version != HC_VERSION)
    return hc::error(Code::kInvalidArgument, "request version ", r.version, ", this library speaks ", HC_VERSION);
  if (r.op < 0 || r.op >= hc::kOpCount) return hc::error(Code::kInvalidArgument, "unknown operation ", r.op);
  if (r.reduce < 0 || r.reduce >= hc::kReduceCount)
    return hc::error(Code::kInvalidArgument, "unknown reduction ", r.reduce);
  if (r.device != HC_HOST && r.device != HC_CUDA)
    return hc::error(Code::kInvalidArgument, "unknown kind of device ", r.device);
  const bool bare = r.op == HC_BARRIER || r.op == HC_JOIN, may_be_bare = r.op == HC_SCATTER || r.op == HC_RECEIVE;
  if (bare ? n != 0 : n < (may_be_bare ? 0 : 1))
    return hc::error(Code::kInvalidArgument, name_of(static_cast<hc::Op>(r.op)), " with ", n, " tensors");
  if ((r.op == HC_ALLTOALL || r.op == HC_SEND || may_be_bare) && n > 1)
    return hc::error(Code::kInvalidArgument, name_of(static_cast<hc::Op>(r.op)), " takes one tensor");
  for (int32_t i = 0; i < n; ++i) {
    const hc_tensor& t = tensors[i];
    if (t.dtype < 0 || t.dtype >= hc::kDTypeCount) return hc::error(Code::kInvalidArgument, "unknown dtype ", t.dtype);
    if (t.rank < 0 || t.rank > 64) return hc::error(Code::kInvalidArgument, "a tensor with ", t.rank, " dimensions");
    (*out)[static_cast<size_t>(i)] = {
        t.in, t.out, {t.shape, static_cast<size_t>(t.rank)}, static_cast<hc::DType>(t.dtype)};
  }
  s->op = static_cast<hc::Op>(r.op);
  s->reduce = static_cast<hc::Reduce>(r.reduce);
  s->root = r.root;
  s->process_set = r.process_set;
  if (r.name) s->name = r.name;
  s->prescale = r.prescale;
  s->postscale = r.postscale;
  s->tensors = out->first(n);
  s->tag = r.tag;
  s->priority = r.priority;
  s->left_out = r.left_out;
  if (r.splits) s->splits = {r.splits, static_cast<size_t>(r.split_count)};
  if (r.awaited) s->awaited = {r.awaited, static_cast<size_t>(r.awaited_count)};
  s->will_wait = r.will_wait != 0;
  s->place = {r.device != HC_CUDA || r.op == HC_BARRIER, r.device_index};
  s->stream = r.stream;
  s->ready_event = r.ready_event;
  return hc::Status::ok();
}

// hc_done sees a hc_status*, which lives for the call.
struct DoneContext {
  hc_done done;
  void* context;
};
void call_done(void* context, int64_t handle, const hc::Status& status) {
  std::unique_ptr<DoneContext> c(static_cast<DoneContext*>(context));
  hc_status wrapped{status};
  c->done(c->context, handle, status.is_ok() ? nullptr : &wrapped);
}

template <class Send>
hc::Status submit(const hc_request& request, const hc_tensor* tensors, int32_t n, Send&& send) {
  Tensors list(n);
  hc::Submission s;
  HC_TRY(read_request(request, tensors, n, &list, &s));
  std::unique_ptr<DoneContext> context;
  if (request.done) {
    context = std::make_unique<DoneContext>(DoneContext{request.done, request.done_context});
    s.done = call_done;
    s.done_context = context.get();
  }
  HC_TRY(send(s));
  (void)context.release();  // call_done frees it
  return hc::Status::ok();
}

}  // namespace

extern "C" {

hc_code hc_status_code(const hc_status* s) { return s ? static_cast<hc_code>(s->status.code()) : HC_OK; }
const char* hc_status_text(const hc_status* s) { return s ? s->status.text().c_str() : ""; }
int32_t hc_status_culprit(const hc_status* s) { return s ? s->status.culprit() : -1; }
void hc_status_destroy(hc_status* s) { delete s; }

hc_status* hc_runtime_create(const char* const* names, const char* const* values, int32_t n, hc_runtime** out) {
  return guarded([&]() -> hc::Status {
    auto config = hc::Config::read(settings_of(names, values, n));
    if (!config.is_ok()) return config.status();
    auto engine = hc::Engine::create(config.take());
    if (!engine.is_ok()) return engine.status();
    auto runtime = std::make_unique<hc_runtime>();
    runtime->engine = engine.take();
    runtime->endpoint = runtime->engine->endpoint();
    *out = runtime.release();
    return hc::Status::ok();
  });
}
void hc_runtime_destroy(hc_runtime* rt) { delete rt; }

const uint8_t* hc_endpoint(const hc_runtime* rt, size_t* bytes) {
  *bytes = rt->endpoint.size();
  return reinterpret_cast<const uint8_t*>(rt->endpoint.data());
}

hc_status* hc_connect(hc_runtime* rt, const hc_members* m) {
  return guarded([&]() -> hc::Status {
    if (m->version != HC_VERSION) return hc::error(hc::Code::kInvalidArgument, "members version ", m->version);
    if (m->size < 1 || m->rank < 0 || m->rank >= m->size)
      return hc::error(hc::Code::kInvalidArgument, "rank ", m->rank, " of ", m->size);
    if (m->secret_bytes < 16)
      return hc::error(hc::Code::kInvalidArgument, "the job secret has ", m->secret_bytes, " bytes; 16 are needed");
    hc::MeshMembers members;
    members.rank = m->rank;
    for (int32_t r = 0; r < m->size; ++r)
      members.endpoints.emplace_back(reinterpret_cast<const char*>(m->endpoints[r]), m->endpoint_bytes[r]);
    members.secret.assign(reinterpret_cast<const char*>(m->secret), m->secret_bytes);
    members.job = m->job ? m->job : "";
    members.generation = m->generation;
    members.timeout_s = m->timeout_s;
    if (m->cancelled) members.cancelled = [m] { return m->cancelled(m->cancelled_context) != 0; };
    if (m->mpi) {
      members.mpi = hc::MpiLink{m->mpi->library, m->mpi->communicator, m->mpi->byte_type, m->mpi->forced != 0};
    }
    return rt->engine->connect(members);
  });
}

int32_t hc_get(const hc_runtime* rt, hc_fact fact) {
  const hc::Mesh& mesh = rt->engine->mesh();
  switch (fact) {
    case HC_RANK:
      return mesh.rank();
    case HC_SIZE:
      return mesh.size();
    case HC_LOCAL_RANK:
      return mesh.local_rank();
    case HC_LOCAL_SIZE:
      return mesh.local_size();
    case HC_CROSS_RANK:
      return mesh.cross_rank();
    case HC_CROSS_SIZE:
      return mesh.cross_size();
    case HC_IS_HOMOGENEOUS:
      return mesh.is_homogeneous();
  }
  return -1;
}

hc_status* hc_submit(hc_runtime* rt, const hc_request* request, const hc_tensor* tensors, int32_t n, hc_handle* out) {
  return guarded([&] {
    return submit(*request, tensors, n, [&](const hc::Submission& s) { return rt->engine->submit(s, out); });
  });
}
hc_status* hc_call(hc_runtime* rt, const hc_request* request, const hc_tensor* tensors, int32_t n, hc_handle* out) {
  return guarded([&] {
    return submit(*request, tensors, n, [&](hc::Submission& s) {
      s.will_wait = true;
      return rt->engine->call(s, out);
    });
  });
}
hc_status* hc_start(hc_runtime* rt, const hc_request* request, const hc_tensor* tensors, int32_t n, hc_handle* out) {
  return guarded(
      [&] { return submit(*request, tensors, n, [&](const hc::Submission& s) { return rt->engine->start(s, out); }); });
}

hc_status* hc_declare(hc_runtime* rt, const hc_request* common, const char* const* names, const hc_tensor* tensors,
                      int32_t n, int32_t* id) {
  return guarded([&]() -> hc::Status {
    Tensors list(n);
    hc::Submission s;
    HC_TRY(read_request(*common, tensors, n, &list, &s));
    hc::BucketSet set;
    set.place = s.place;
    set.reduce = s.reduce;
    set.prescale = s.prescale;
    set.postscale = s.postscale;
    for (int32_t i = 0; i < n; ++i) {
      const hc::Submission::Tensor& t = list[static_cast<size_t>(i)];
      if (t.in != t.out)
        return hc::error(hc::Code::kInvalidArgument, "bucket ", hc::in_quotes(names[i]), " must be reduced in place");
      set.buckets.push_back({names[i], static_cast<std::byte*>(t.out), {t.shape.begin(), t.shape.end()}, t.dtype});
    }
    return rt->engine->declare(s.process_set, std::move(set), id);
  });
}
hc_status* hc_submit_declared(hc_runtime* rt, int32_t process_set, int32_t id, int32_t bucket, void* stream,
                              int32_t priority, hc_handle* out) {
  return guarded([&] { return rt->engine->submit_declared(process_set, id, bucket, {stream, priority}, out); });
}
int32_t hc_memory_pressure(hc_runtime* rt, hc_memory_state what) {
  hc::MemoryPressure& pressure = rt->engine->memory_pressure();
  if (what == HC_MEMORY_CAN_FREE) pressure.offer();
  if (what == HC_MEMORY_FREED) pressure.gave();
  if (what == HC_MEMORY_IS_LACKING) rt->engine->trim_memory();
  return pressure.is_wanted() ? 1 : 0;
}
hc_status* hc_undeclare(hc_runtime* rt, int32_t process_set, int32_t id) {
  return guarded([&] { return rt->engine->undeclare(process_set, id); });
}

int32_t hc_poll(hc_runtime* rt, hc_handle handle) { return rt->engine->poll(handle); }

hc_status* hc_wait(hc_runtime* rt, hc_handle handle, double timeout_s, int32_t* done) {
  return guarded([&] {
    bool is_done = false;
    hc::Status status = rt->engine->wait(handle, timeout_s, &is_done);
    *done = is_done;
    return status;
  });
}

int32_t hc_advance(hc_runtime* rt, hc_handle handle) { return rt->engine->advance(handle); }

int32_t hc_finish(hc_runtime* rt, hc_handle handle) { return rt->engine->release_if_succeeded(handle); }
int32_t hc_has_no_result(hc_runtime* rt, hc_handle handle) {
  const hc::Operation* op = rt->engine->finished(handle);
  if (!op || !op->status.is_ok() || op->results_in_work) return 0;
  for (const auto& memory : op->results)
    if (memory) return 0;
  return 1;
}

hc_status* hc_take_result(hc_runtime* rt, hc_handle handle, int32_t i, hc_result* out, hc_block** memory) {
  return guarded([&]() -> hc::Status {
    hc::Operation* op = rt->engine->finished(handle);
    if (!op) return hc::error(hc::Code::kInvalidArgument, "handle ", handle, " is not done, unknown or released");
    const bool has = i >= 0 && static_cast<size_t>(i) < op->results.size() && op->results[i];
    *memory = has ? new hc_block{std::move(op->results[i])} : nullptr;
    const bool has_rows = i >= 0 && static_cast<size_t>(i) < op->first_dimension.size();
    *out = {has_rows ? op->first_dimension[i] : 0,
            op->rows_from.data(),
            static_cast<int32_t>(op->rows_from.size()),
            op->join_rank,
            -1,
            nullptr,
            0,
            op->source,
            op->results_in_work ? HC_CUDA : HC_HOST,
            op->results_in_work ? op->work->index() : -1};
    if (op->received) {
      out->dtype = static_cast<int32_t>(op->received->dtype);
      out->shape = op->received->shape.data();
      out->shape_rank = static_cast<int32_t>(op->received->shape.size());
    }
    return hc::Status::ok();
  });
}
hc_status* hc_stream_wait(hc_runtime* rt, hc_handle handle, void* stream) {
  return guarded([&] { return rt->engine->stream_wait(handle, stream); });
}
hc_status* hc_copy_result(hc_runtime* rt, hc_handle handle, int32_t i, void* to, size_t bytes, void* stream) {
  return guarded([&]() -> hc::Status {
    if (i < 0) return hc::error(hc::Code::kInvalidArgument, "result ", i);
    return rt->engine->copy_result(handle, static_cast<size_t>(i), to, bytes, stream);
  });
}
void hc_release(hc_runtime* rt, hc_handle handle) { rt->engine->release(handle); }

hc_status* hc_process_set_add(hc_runtime* rt, const int32_t* ranks, int32_t n, int32_t* id) {
  return guarded([&] { return rt->engine->add_process_set(std::vector<int>(ranks, ranks + n), id); });
}
hc_status* hc_process_set_remove(hc_runtime* rt, int32_t id) {
  return guarded([&] { return rt->engine->remove_process_set(id); });
}
int32_t hc_process_set_size(hc_runtime* rt, int32_t id) { return rt->engine->place_in(id).size; }
int32_t hc_process_set_rank(hc_runtime* rt, int32_t id) { return rt->engine->place_in(id).rank; }

hc_status* hc_block_create(hc_runtime* rt, size_t bytes, hc_block** out) {
  return guarded([&]() -> hc::Status {
    auto memory = rt->engine->allocate(bytes);
    if (!memory.is_ok()) return memory.status();
    *out = new hc_block{memory.take()};
    return hc::Status::ok();
  });
}
hc_status* hc_device_block_create(hc_runtime* rt, int32_t device_index, size_t bytes, hc_block** out) {
  return guarded([&]() -> hc::Status {
    auto memory = rt->engine->allocate_elsewhere(device_index, bytes);
    HC_TRY(memory.status());
    *out = new hc_block{memory.take()};
    return hc::Status::ok();
  });
}
int32_t hc_shares_memory(hc_runtime* rt) { return rt->engine->shares_memory(); }
void* hc_block_data(hc_block* block) { return block->memory->data(); }
size_t hc_block_bytes(hc_block* block) { return block->memory->bytes(); }
void hc_block_destroy(hc_block* block) { delete block; }

void hc_abort(hc_runtime* rt, const char* text) { rt->engine->abort(text); }
void hc_break_off(hc_runtime* rt, hc_handle handle, const char* text) { rt->engine->break_off(handle, text); }
void hc_say_ending(hc_runtime* rt) { rt->engine->say_ending(); }
int32_t hc_all_are_ending(hc_runtime* rt) { return rt->engine->all_are_ending(); }
hc_status* hc_shutdown(hc_runtime* rt, double timeout_s) {
  return guarded([&] { return rt->engine->shutdown(timeout_s); });
}
void hc_after_fork_child(hc_runtime* rt) { rt->engine->after_fork_child(); }

const char* hc_counters(hc_runtime* rt) { return keep(rt->engine->counters_json()); }
const char* hc_flight_record(hc_runtime* rt, const char* reason) { return keep(rt->engine->flight_record(reason)); }
hc_status* hc_timeline_start(hc_runtime* rt, const char* path, int32_t mark_cycles) {
  return guarded([&] { return rt->engine->start_timeline(path, mark_cycles != 0); });
}
hc_status* hc_timeline_stop(hc_runtime* rt) {
  return guarded([&] { return rt->engine->stop_timeline(); });
}
hc_status* hc_timeline_listen(hc_runtime* rt) {
  return guarded([&] { return rt->engine->listen_to_timeline(); });
}
void hc_log_take(int32_t takes) {
  if (takes)
    hc::LogLines::of_process().begin();
  else
    hc::LogLines::of_process().end();
}
const char* hc_log_lines(void) {
  std::string text = "[";
  for (const hc::LogLine& line : hc::LogLines::of_process().take())
    text += hc::text_of(text.size() > 1 ? "," : "", "[\"", hc::name_of(line.level), "\",", line.rank, ",", line.unix_ns,
                        ",", hc::json_text(line.text), "]");
  return keep(text + "]");
}
void hc_log_warning(int32_t rank, const char* text) {
  hc::Logger log(hc::LogLevel::kWarning);
  log.set_rank(rank);
  log.warning(text);
}
const char* hc_timeline_heard(hc_runtime* rt) { return keep(rt->engine->heard_of_timeline()); }
void hc_timeline_span(hc_runtime* rt, const char* name, double from_s, double seconds, const char* args) {
  rt->engine->timeline_span(name, from_s, seconds, args);
}
void hc_watch_stack(hc_runtime* rt, int32_t signal, int32_t fd, int32_t thread, const char* libraries) {
  rt->engine->watch_stack(signal, fd, thread, libraries);
}
hc_status* hc_rank_metrics_share(hc_runtime* rt, int32_t fd, uint64_t offset, const char* program) {
  return guarded([&] { return rt->engine->share_rank_metrics(fd, offset, program); });
}
const char* hc_rank_metrics(hc_runtime* rt) { return keep(rt->engine->rank_metrics()); }
const char* hc_describe(hc_runtime* rt) { return keep(rt->engine->describe()); }
}  // extern "C"
