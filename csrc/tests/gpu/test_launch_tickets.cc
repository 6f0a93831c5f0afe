// The order of work on GPUs where tickets and plans reach a rank on different paths: it must be rank 0's on every rank,
// whatever is late.
#include <doctest/doctest.h>

#include <array>
#include <random>

#include "engine/gpu/launch_tickets.h"

namespace hc {
namespace {

struct OnTheWay {  // a plan with batches, or a ticket
  uint32_t batches = 0, after = 0;
  std::vector<TicketsBefore> before;
  LaunchTicket ticket;
  bool is_mine = true;
};

std::vector<LaunchTicket> order_of(LaunchTickets* tickets) {
  std::vector<LaunchTicket> order;
  for (; tickets->next(); tickets->over()) order.push_back(*tickets->next());
  return order;
}

}  // namespace

TEST_CASE("launch tickets: plans and tickets that overtake each other end in the order of rank 0") {
  constexpr int kRanks = 5;
  std::mt19937 random(7);
  const auto pick = [&](uint32_t below) { return static_cast<uint32_t>(random()) % below; };
  for (int repeat = 0; repeat < 300; ++repeat) {
    LaunchTickets leader;
    std::array<LaunchTickets, kRanks> ranks;
    std::array<std::deque<OnTheWay>, kRanks> plans, frames;
    std::array<std::vector<LaunchTicket>, kRanks> expected;
    for (int i = 0; i < 60; ++i) {
      if (pick(4) == 0) {
        const uint32_t batches = 1 + pick(3);
        const auto before = leader.plan(batches);
        for (int r = 1; r < kRanks; ++r) {
          plans[r].push_back({batches, 0, before, {}});
          expected[r].insert(expected[r].end(), batches, LaunchTicket{0});
        }
      } else {
        const int r = 1 + static_cast<int>(pick(kRanks - 1));
        const LaunchTicket ticket{static_cast<uint16_t>(1 + pick(3)), i};
        const bool is_mine = pick(8) != 0;
        frames[r].push_back({0, leader.given_to(r, 1), {}, ticket, is_mine});
        if (is_mine) expected[r].push_back(ticket);
      }
    }
    for (int r = 1; r < kRanks; ++r) {
      while (!plans[r].empty() || !frames[r].empty()) {
        const bool plan = !plans[r].empty() && (frames[r].empty() || pick(2) == 0);
        auto& from = plan ? plans[r] : frames[r];
        const OnTheWay& first = from.front();
        if (plan)
          ranks[r].take_plan(first.batches, r, first.before);
        else
          ranks[r].take_given(first.ticket, 1, first.after, first.is_mine);
        if (!plan && first.is_mine) REQUIRE(ranks[r].contains(first.ticket));  // wherever it waits
        from.pop_front();
      }
      REQUIRE(order_of(&ranks[r]) == expected[r]);
    }
  }
}

TEST_CASE("launch tickets: what a removed set was given counts and takes no place") {
  LaunchTickets leader, rank;
  const uint32_t first = leader.given_to(1, 1);
  const auto before = leader.plan(1);
  const uint32_t second = leader.given_to(1, 2);
  CHECK(before == std::vector<TicketsBefore>{{1, 1, 1}});
  rank.take_given({4}, 2, second, true);  // cannot be before `first` on the wire, but waits in any case
  CHECK(rank.contains(4));
  rank.drop(4);
  CHECK_FALSE(rank.contains(4));
  LaunchTickets other;
  other.take_plan(1, 1, before);
  CHECK(other.next() == nullptr);  // waits for the ticket before it
  other.take_given({4}, 1, first, false);
  CHECK(order_of(&other) == std::vector<LaunchTicket>{{0}});
}

TEST_CASE("launch tickets: ranks that were given alike are one run in a plan") {
  LaunchTickets leader;
  for (int r = 2; r < 500; ++r) leader.given_to(r, 3);
  leader.given_to(600, 1);
  CHECK(leader.plan(1) == std::vector<TicketsBefore>{{2, 498, 3}, {600, 1, 1}});
  CHECK(leader.plan(1).empty());
}

}  // namespace hc
