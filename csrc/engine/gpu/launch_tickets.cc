#include "engine/gpu/launch_tickets.h"

#include <algorithm>
#include <iterator>

namespace hc {

namespace {

// Words of the list that are no tickets, by the number in place of the process set's; LaunchTicket::bucket is the
// value.
constexpr uint16_t kPlaceOfNext = 0xfffe;      // the next ticket comes behind this bucket
constexpr uint16_t kNextAreAhead = 0xfffd;     // so many tickets may be withdrawn
constexpr uint16_t kWithdrawnBehind = 0xfffc;  // all of those with a later number than this are

// Numbers wrap around; two that are compared are never far from each other.
bool is_behind(uint32_t earlier, uint32_t later) { return static_cast<int32_t>(later - earlier) > 0; }
uint32_t later_of(uint32_t a, uint32_t b) { return is_behind(a, b) ? b : a; }
// SegmentFlags::buckets_begun.
uint64_t begun_word(uint32_t bucket, uint32_t reads_first) { return uint64_t{bucket} << 32 | reads_first; }

}  // namespace

uint64_t word_of(const LaunchTicket& ticket) {
  return static_cast<uint64_t>(ticket.with_next) << 63 | static_cast<uint64_t>(ticket.sender) << 48 |
         static_cast<uint64_t>(ticket.set) << 32 | static_cast<uint32_t>(ticket.bucket);
}
LaunchTicket ticket_of(uint64_t word) {
  return {static_cast<uint16_t>(word >> 32), static_cast<int32_t>(static_cast<uint32_t>(word)),
          static_cast<uint16_t>(word >> 48 & 0x7fff), word >> 63 != 0};
}

void LaunchTickets::add(LaunchTicket ticket, uint32_t count) { tickets_.insert(tickets_.end(), count, ticket); }

void LaunchTickets::give_bucket(LaunchTicket ticket) {
  ticket.number = ++numbered_;
  tickets_.push_back(ticket);
  waiting_.push_back(word_of(ticket));
}

// Behind the newest bucket that one of `ranks` has begun, and behind what they were given before. Ranks that do not
// take part may have begun later ones.
void LaunchTickets::give(LaunchTicket ticket, uint32_t count, std::span<const int> ranks) {
  const bool is_mine = std::find(ranks.begin(), ranks.end(), 0) != ranks.end();
  if (numbered_ == 0) {
    if (is_mine) add(ticket, count);
    waiting_.insert(waiting_.end(), count, word_of(ticket));
    return;
  }
  placed_.resize(static_cast<size_t>(shared_->size()));
  const auto reads_first = static_cast<uint32_t>(given_ + waiting_.size() + 2 * size_t{count});
  uint32_t place = begun_by(ranks[0], reads_first);
  for (const int r : ranks)
    place = later_of(place, later_of(begun_by(r, reads_first), placed_[static_cast<size_t>(r)]));
  for (const int r : ranks) placed_[static_cast<size_t>(r)] = place;
  for (uint32_t i = 0; i < count; ++i) {
    waiting_.push_back(word_of({kPlaceOfNext, static_cast<int32_t>(place)}));
    waiting_.push_back(word_of(ticket));
    if (is_mine) insert(ticket, place);
  }
}

void LaunchTickets::give_ahead(std::span<const LaunchTicket> buckets) {
  waiting_.push_back(word_of({kNextAreAhead, static_cast<int32_t>(buckets.size())}));
  for (LaunchTicket ticket : buckets) {
    ticket.ahead = true;
    give_bucket(ticket);
  }
  has_ahead_ = true;
}

void LaunchTickets::withdraw_ahead() {
  if (!has_ahead_) return;
  const auto reads_first = static_cast<uint32_t>(given_ + waiting_.size() + 1);
  uint32_t last = begun_;
  for (int r = 1; r < shared_->size(); ++r) last = later_of(last, begun_by(r, reads_first));
  waiting_.push_back(word_of({kWithdrawnBehind, static_cast<int32_t>(last)}));
  cut(last);
  has_ahead_ = false;
  ++times_withdrawn_;
}

// On rank 0: the newest bucket that `rank` has begun; it begins no other before it has read the list so far.
uint32_t LaunchTickets::begun_by(int rank, uint32_t reads_first) {
  if (rank == 0) return begun_;
  std::atomic<uint64_t>& word = shared_->flags(rank).buckets_begun;
  uint64_t old = word.load(std::memory_order_acquire);
  const auto begun = [&] { return static_cast<uint32_t>(old >> 32); };
  while (begun() != numbered_ && !word.compare_exchange_weak(old, begun_word(begun(), reads_first))) {
  }
  return begun();
}

bool LaunchTickets::begin_buckets(size_t count) {
  const uint32_t number = tickets_[count - 1].number;
  if (shared_->index() == 0) {
    begun_ = number;
    return true;
  }
  std::atomic<uint64_t>& word = shared_->mine().buckets_begun;
  uint64_t old = word.load(std::memory_order_acquire);
  do {
    if (is_behind(static_cast<uint32_t>(taken_), static_cast<uint32_t>(old))) return false;
  } while (!word.compare_exchange_weak(old, begun_word(number, static_cast<uint32_t>(old))));
  return true;
}

bool LaunchTickets::is_held() const {
  if (!shared_ || shared_->index() == 0) return false;
  const uint64_t word = shared_->mine().buckets_begun.load(std::memory_order_acquire);
  return is_behind(static_cast<uint32_t>(taken_), static_cast<uint32_t>(word));
}

void LaunchTickets::insert(const LaunchTicket& ticket, uint32_t place) {
  auto at = tickets_.end();
  while (at != tickets_.begin() && std::prev(at)->is_bucket() && is_behind(place, std::prev(at)->number)) --at;
  tickets_.insert(at, ticket);
}

void LaunchTickets::cut(uint32_t last) {
  std::erase_if(tickets_, [&](const LaunchTicket& t) { return t.ahead && is_behind(last, t.number); });
  for (LaunchTicket& ticket : tickets_) ticket.ahead = false;
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
  for (; taken_ < given; ++taken_)
    take_word(ticket_of(leader.tickets[taken_ % kTicketsKept].load(std::memory_order_relaxed)), is_mine);
  shared_->mine().tickets_taken.store(taken_, std::memory_order_release);  // rank 0 looks when it lacks room: no bell
  return true;
}

void LaunchTickets::take_word(LaunchTicket ticket, const std::function<bool(const LaunchTicket&)>& is_mine) {
  const auto value = static_cast<uint32_t>(ticket.bucket);
  if (ticket.set == kPlaceOfNext) {
    place_ = value;
  } else if (ticket.set == kNextAreAhead) {
    ahead_ = value;
  } else if (ticket.set == kWithdrawnBehind) {
    cut(value);
  } else if (ticket.is_bucket()) {
    ticket.number = ++numbered_;
    if ((ticket.ahead = ahead_ > 0)) --ahead_;
    if (is_mine(ticket)) tickets_.push_back(ticket);
  } else if (is_mine(ticket)) {
    insert(ticket, place_);
  }
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
  has_ahead_ = false;
  given_out_.clear();
  frames_.clear();
  plans_.clear();
  planned_ = granted_ = expected_ = 0;
}

}  // namespace hc
