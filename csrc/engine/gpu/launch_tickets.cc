#include "engine/gpu/launch_tickets.h"

#include <algorithm>

namespace hc {

uint64_t word_of(const LaunchTicket& ticket) {
  return static_cast<uint64_t>(ticket.with_next) << 63 | static_cast<uint64_t>(ticket.sender) << 48 |
         static_cast<uint64_t>(ticket.set) << 32 | static_cast<uint32_t>(ticket.bucket);
}
LaunchTicket ticket_of(uint64_t word) {
  return {static_cast<uint16_t>(word >> 32), static_cast<int32_t>(static_cast<uint32_t>(word)),
          static_cast<uint16_t>(word >> 48 & 0x7fff), word >> 63 != 0};
}

void LaunchTickets::add(LaunchTicket ticket, uint32_t count) { tickets_.insert(tickets_.end(), count, ticket); }

void LaunchTickets::give(LaunchTicket ticket, uint32_t count, bool is_mine) {
  if (is_mine) add(ticket, count);
  waiting_.insert(waiting_.end(), count, word_of(ticket));
}

bool LaunchTickets::pass_on(const std::vector<bool>& gone) {
  if (waiting_.empty()) return true;
  uint64_t slowest = given_;
  for (int m = 1; m < shared_->size(); ++m)
    if (!gone[static_cast<size_t>(m)])
      slowest = std::min(slowest, shared_->flags(m).tickets_taken.load(std::memory_order_acquire));
  SegmentFlags& mine = shared_->mine();
  const uint64_t before = given_;
  for (; !waiting_.empty() && given_ - slowest < kTicketsKept; ++given_) {
    mine.tickets[given_ % kTicketsKept].store(waiting_.front(), std::memory_order_relaxed);
    waiting_.pop_front();
  }
  if (given_ != before) shared_->publish(mine.tickets_given, given_);
  return waiting_.empty();
}

bool LaunchTickets::take(const std::function<bool(const LaunchTicket&)>& is_mine) {
  if (!shared_ || shared_->index() == 0) return false;
  const SegmentFlags& leader = shared_->flags(0);
  const uint64_t given = leader.tickets_given.load(std::memory_order_acquire);
  if (given == taken_) return false;
  for (; taken_ < given; ++taken_) {
    const LaunchTicket ticket = ticket_of(leader.tickets[taken_ % kTicketsKept].load(std::memory_order_relaxed));
    if (is_mine(ticket)) tickets_.push_back(ticket);
  }
  shared_->mine().tickets_taken.store(taken_, std::memory_order_release);  // rank 0 looks when it lacks room: no bell
  return true;
}

// ---- in frames

uint32_t LaunchTickets::given_to(int rank, uint32_t count) {
  const auto r = static_cast<size_t>(rank);
  if (given_out_.size() <= r) given_out_.resize(r + 1);
  given_out_[r] += count;
  return planned_;
}

std::vector<TicketsBefore> LaunchTickets::plan(uint32_t batches) {
  planned_ += batches;
  std::vector<TicketsBefore> runs;
  for (uint32_t r = 0; r < given_out_.size(); ++r) {
    if (given_out_[r] == 0) continue;
    if (!runs.empty() && runs.back().first + runs.back().ranks == r && runs.back().tickets == given_out_[r])
      ++runs.back().ranks;
    else
      runs.push_back({r, 1, given_out_[r]});
  }
  given_out_.clear();
  return runs;
}

void LaunchTickets::take_given(LaunchTicket ticket, uint32_t count, uint32_t after, bool is_mine) {
  frames_.push_back({ticket, count, after, is_mine});
  settle();
}

void LaunchTickets::take_plan(uint32_t batches, int rank, const std::vector<TicketsBefore>& before) {
  const auto r = static_cast<uint32_t>(rank);
  for (const TicketsBefore& run : before)
    if (r >= run.first && r - run.first < run.ranks) expected_ += run.tickets;
  plans_.push_back({{0}, batches, expected_, true});
  settle();
}

void LaunchTickets::settle() {
  const auto settle_one = [this](std::deque<Early>* from, uint32_t* passed, uint32_t other) {
    if (from->empty() || from->front().after != other) return false;
    const Early& first = from->front();
    if (first.is_mine) add(first.ticket, first.count);
    *passed += first.count;
    from->pop_front();
    return true;
  };
  while (settle_one(&frames_, &granted_, planned_) || settle_one(&plans_, &planned_, granted_)) {
  }
}

// ----

bool LaunchTickets::any(const std::function<bool(const LaunchTicket&)>& is_it) const {
  const auto early = [&](const Early& e) { return e.is_mine && is_it(e.ticket); };
  return std::any_of(tickets_.begin(), tickets_.end(), is_it) || std::any_of(frames_.begin(), frames_.end(), early) ||
         std::any_of(plans_.begin(), plans_.end(), early);
}

bool LaunchTickets::contains(uint16_t set) const {
  return any([&](const LaunchTicket& ticket) { return ticket.set == set; });
}

bool LaunchTickets::contains(const LaunchTicket& ticket) const {
  return any([&](const LaunchTicket& other) { return other == ticket; });
}

void LaunchTickets::drop(uint16_t set) {
  std::erase_if(tickets_, [&](const LaunchTicket& ticket) { return ticket.set == set; });
  for (Early& early : frames_) early.is_mine = early.is_mine && early.ticket.set != set;
}

void LaunchTickets::clear() {
  tickets_.clear();
  waiting_.clear();
  given_out_.clear();
  frames_.clear();
  plans_.clear();
  planned_ = granted_ = expected_ = 0;
}

}  // namespace hc
