// The batches of one process set: those planned, in order, the one that runs, and those that wait between two of their
// parts. Thread: the thread that makes progress. Owner: a process set.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <utility>

#include "engine/sets/batch_runner.h"

namespace hc {

class BatchQueue {
 public:
  void add(PlanBatch batch) { planned_.push_back(std::move(batch)); }
  size_t planned() const { return planned_.size(); }
  // Decided but not finished.
  size_t busy() const { return planned_.size() + (runner_ ? 1 : 0); }
  bool is_idle() const { return !runner_ && planned_.empty() && cut_.empty(); }
  bool has_work() const { return runner_ || !planned_.empty(); }

  BatchRunner* runner() { return runner_.get(); }  // null: none is under way
  const BatchRunner* runner() const { return runner_.get(); }
  // What comes next moves no data, as all ranks that have announced it are told of an error.
  bool next_is_refused() const { return !runner_ && !planned_.empty() && planned_.front().error != Code::kOk; }
  PlanBatch take_next() {
    PlanBatch batch = std::move(planned_.front());
    planned_.pop_front();
    return batch;
  }
  void begin(std::unique_ptr<BatchRunner> runner) { runner_ = std::move(runner); }
  // Resumes the batch of which `batch` is a later part. False: this rank does not run that batch in parts.
  bool resume(const PlanBatch& batch) {
    const auto at = cut_.find(batch.part.first);
    if (at == cut_.end() || at->second->batch().part.index + 1 != batch.part.index) return false;
    runner_ = std::move(at->second);
    cut_.erase(at);
    runner_->next_part(batch.id);
    return true;
  }
  // Puts the batch aside after a part, so that something urgent can run in between.
  void put_aside() {
    const uint32_t first = runner_->batch().part.first;
    cut_[first] = std::move(runner_);
  }
  std::unique_ptr<BatchRunner> take_runner() { return std::move(runner_); }
  void clear() {
    runner_.reset();
    cut_.clear();
    planned_.clear();
  }

 private:
  std::deque<PlanBatch> planned_;
  std::unique_ptr<BatchRunner> runner_;
  std::map<uint32_t, std::unique_ptr<BatchRunner>> cut_;  // by id of the first part
};

}  // namespace hc
