#include "engine/gpu/device_batch.h"

#include "engine/gpu/device_work.h"

namespace hc {

namespace {
constexpr double kFreesWithinS = 10;  // until the framework has given memory back
}

Progress DeviceBatch::begin(const std::vector<Operation*>& operations, bool* moved) {
  if (begun_) return Progress::kDone;
  if (!set_up_) {
    if (!may_launch_()) return Progress::kPending;
    // Who has joined may get a GPU only after the ranks have agreed, for good, on who moves the data.
    if (status_ = group_.make_stream(); !status_.is_ok()) return Progress::kFailed;
    Progress progress = Progress::kDone;
    if (!setup_ && (setup_ = group_.make_setup(tag_))) progress = setup_->start();
    if (setup_ && progress != Progress::kFailed) progress = setup_->step(moved);
    if (progress == Progress::kFailed) status_ = setup_->status();
    if (progress != Progress::kDone) return progress;
    setup_.reset();
    set_up_ = true;
  }
  begun_ = true;
  status_ = await_inputs(operations);
  return status_.is_ok() ? Progress::kDone : Progress::kFailed;
}

bool DeviceBatch::may_get_memory() {
  if (!group_.gpu() || !group_.gpu()->was_full() || !pressure_.is_offered() || waits_) return false;
  waits_ = true;
  next_stand_in_ = 0;
  given_ = pressure_.times_given();
  until_ = Deadline::in(kFreesWithinS);
  pressure_.want();
  return true;
}

Status DeviceBatch::await_inputs(const std::vector<Operation*>& operations) {
  for (const Operation* op : operations) {
    if (!op || !op->work) continue;
    if (const CuEvent ready = work_of(op)->ready_event())
      HC_TRY(group_.gpu()->wait(group_.stream()->get(), ready), op->describe());
    input_ = work_of(op)->ready;
  }
  return Status::ok();
}

Result<std::byte*> DeviceBatch::result_memory(Operation* op, size_t tensor, size_t bytes) {
  if (!bytes) return static_cast<std::byte*>(nullptr);
  auto memory = group_.gpu()->device_memory(bytes, group_.stream());
  HC_TRY(memory.status());
  std::vector<GpuMemoryPtr>& results = work_of(op)->results;
  results.resize(std::max(results.size(), tensor + 1));
  results[tensor] = memory.value();
  return memory.value()->data();
}

Result<std::byte*> DeviceBatch::identity(DType dtype, Reduce reduce, size_t count) {
  const size_t bytes = count * size_of(dtype);
  if (!group_.gpu()) {  // then the data goes through host memory
    auto memory = Memory::make_private(bytes);
    if (!memory) return error(Code::kInternal, "no memory for ", bytes, " bytes");
    held_on_host_.push_back(memory);
    fill_identity(dtype, reduce, memory->data(), count);
    return memory->data();
  }
  auto pinned = group_.gpu()->pinned_memory(bytes);
  HC_TRY(pinned.status());
  const CuStream stream = group_.stream()->get();
  std::byte* at = next_stand_in_ < stand_ins_.at.size() ? stand_ins_.at[next_stand_in_++] : nullptr;
  if (at) {
    HC_TRY(group_.gpu()->wait(stream, stand_ins_.free->get()));
  } else {
    auto memory = group_.gpu()->device_memory(bytes, group_.stream());
    HC_TRY(memory.status());
    held_.push_back(memory.value());
    at = memory.value()->data();
  }
  held_.push_back(pinned.value());
  fill_identity(dtype, reduce, pinned.value()->data(), count);
  HC_TRY(group_.gpu()->copy_from_host(cu_pointer(at), pinned.value()->data(), bytes, stream));
  return at;
}

Status DeviceBatch::finish(const std::vector<Operation*>& operations) {
  if (!group_.gpu()) return Status::ok();
  auto done = group_.gpu()->record(group_.stream()->get());
  HC_TRY(done.status());
  for (const GpuMemoryPtr& memory : held_) memory->used_until(done.value());
  held_.clear();
  const Operation* first = nullptr;
  for (Operation* op : operations) {
    if (!op || !op->work) continue;
    work_of(op)->done = done.value();
    if (!first) first = op;
  }
  // Without one this rank has joined.
  group_.launched({first ? first->describe() : "what others reduce", std::move(input_), done.take()});
  return Status::ok();
}

}  // namespace hc
