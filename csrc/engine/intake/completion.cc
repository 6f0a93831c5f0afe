#include "engine/intake/completion.h"

namespace hc {

void Completion::finish(Operation* op, Status status) {
  const nvtx::Range range([&] { return text_of("complete ", op->describe()); });
  op->span.end();
  intake_.recorder().done(op->record, status.code(), Recorder::now());
  if (tuner_.is_searching() && status.is_ok()) tuner_.completed(*op);
  if (timeline_.on() && !is_message(op->signature().op)) timeline_.done(*op, status);
  if (status.code() == Code::kMismatch) records_.save_mismatch(status);
  op->status = std::move(status);
  std::function<void()> tell;  // made before `op` may be recycled, run after its result may be taken
  if (op->tell.call)
    tell = [callback = op->tell, handle = op->handle, outcome = op->status] {
      callback.call(callback.context, handle, outcome);
    };
  intake_.handles().finished(op);
  if (tell) notifier_.push(std::move(tell));
  progress_lock_.changed();
}

}  // namespace hc
