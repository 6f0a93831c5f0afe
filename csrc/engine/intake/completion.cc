#include "engine/intake/completion.h"

#include "base/clock.h"

namespace hc {

namespace {
uint64_t bytes_of_bucket(const Operation& op) {
  const TensorMeta& tensor = op.signature().tensors[0];
  return static_cast<uint64_t>(tensor.count()) * size_of(tensor.dtype);
}
}  // namespace

void Completion::finish(Operation* op, Status status) {
  const nvtx::Range range([&] { return text_of("complete ", op->describe()); });
  op->span.end();
  const uint64_t ticks = processor_ticks();
  intake_.recorder().done(op->traces.record, status.code(), ticks);
  if (op->traces.is_counted) {
    const bool is_bucket = op->bucket.set >= 0;
    const uint64_t bytes = is_bucket ? bytes_of_bucket(*op) : op->bytes(), now = rank_metrics_.at(ticks);
    op->traces.ended = now;
    rank_metrics_.ended({op->signature().op, status.is_ok() ? bytes : 0, rank_metrics_.at(op->submitted),
                         op->traces.started.load(std::memory_order_relaxed), now, op->request.name,
                         op->name_record ? op->name_record->seen() : nullptr});
    if (rank_metrics_.is_stalled()) rank_metrics_.go_on();  // Loop says so again if something else still waits
    if (rank_metrics_.is_beat_due(now)) intake_.beat();
  }
  if (tuner_.is_searching() && status.is_ok()) tuner_.completed(*op);
  if (timeline_.on() && !is_message(op->signature().op)) timeline_.done(*op, status);
  if (status.code() == Code::kMismatch) records_.save_mismatch(status);
  op->status = std::move(status);
  std::function<void()> tell;  // made before `op` may be recycled, run after its result may be taken
  if (op->tell.call)
    tell = [callback = op->tell, handle = op->handle, outcome = op->status] {
      callback.call(callback.context, handle, outcome);
    };
  // The last look at the record: from here on it may be forgotten.
  if (op->name_record) op->name_record->pending.store(nullptr, std::memory_order_release);
  intake_.handles().finished(op);
  if (tell) notifier_.push(std::move(tell));
  progress_lock_.changed();
}

}  // namespace hc
