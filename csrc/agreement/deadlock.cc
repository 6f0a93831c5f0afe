#include "agreement/deadlock.h"

#include <algorithm>

#include "base/hash.h"

namespace hc {
namespace {

constexpr size_t kShownGroups = 6;  // groups of ranks that stand at one place
constexpr uint32_t kMaxCalls = 1u << 20;

bool is_in(const std::vector<uint64_t>& sorted, uint64_t key) {
  return std::binary_search(sorted.begin(), sorted.end(), key);
}

bool has_joined(const WaitingRank& rank, const AwaitedCall& call) {
  return std::find(rank.joined.begin(), rank.joined.end(), id_of_set(call.world, call.process_set)) !=
         rank.joined.end();
}

std::span<const int> members_in(const AwaitedCall& call, const MembersOf& members_of) {
  return call.members.empty() ? members_of(call.process_set) : std::span<const int>(call.members);
}

// Whom one call waits for.
struct Missing {
  bool is_open = false;  // somebody who is not known to wait may complete it, or it is complete
  bool any = false;      // one of `ranks` is enough
  std::vector<int> ranks;
};

Missing missing_in(const AwaitedCall& call, int rank, const WaitingRanks& ranks, const MembersOf& members_of) {
  Missing missing;
  if (is_message(call.op) && call.peer >= 0) {
    missing.ranks = {call.peer};
  } else {
    missing.any = is_message(call.op);
    for (int member : members_in(call, members_of))
      if (!missing.any || member != rank) missing.ranks.push_back(member);
  }
  const auto is_ready = [&](const WaitingRank& member) {
    if (is_message(call.op)) return false;
    if (has_joined(member, call)) return true;
    return call.op != Op::kJoin && is_in(member.submitted, call.key);
  };
  std::vector<int> late;
  for (int member : missing.ranks) {
    const auto at = ranks.find(member);
    if (at == ranks.end()) {
      missing.is_open = true;
      return missing;
    }
    if (!is_ready(at->second)) late.push_back(member);
  }
  missing.ranks = std::move(late);
  missing.is_open = missing.ranks.empty();
  return missing;
}

// Ranks that stand at one place in one call.
struct Standing {
  const AwaitedCall* call;
  std::string where;
  std::vector<int> ranks;
};

std::vector<Standing> groups_of(const WaitingRanks& ranks, const std::set<int>& stuck) {
  std::vector<Standing> groups;
  for (int rank : stuck) {
    const WaitingRank& waiting = ranks.at(rank);
    const AwaitedCall& call = waiting.awaited.front();
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const Standing& g) {
      return g.call->text == call.text && g.call->process_set == call.process_set && g.call->world == call.world &&
             g.where == waiting.where;
    });
    if (same != groups.end())
      same->ranks.push_back(rank);
    else
      groups.push_back({&call, waiting.where, {rank}});
  }
  return groups;
}

// As far as names tell: gradients.1.0, allreduce_grad.weight, DistributedGradientTape_Allreduce
bool is_of_optimizer(const Standing& group) {
  return group.call->text.find("grad") != std::string::npos || group.call->text.find("Grad") != std::string::npos;
}

// The backward pass of the bindings' differentiable operations: of "allreduce 'x.grad'" it is "'x'".
std::string differentiated_in(const Standing& group) {
  constexpr std::string_view kEnd = ".grad'";
  const std::string& text = group.call->text;
  const size_t quote = text.find('\'');
  return quote == std::string::npos || !text.ends_with(kEnd)
             ? ""
             : text.substr(quote, text.size() - quote - kEnd.size()) + "'";
}

std::string likely_reason(const std::vector<Standing>& groups) {
  for (const Standing& group : groups)
    if (const std::string forward = differentiated_in(group); !forward.empty() && groups.size() == 2) {
      const std::vector<int>& others = groups[&group == &groups[0] ? 1 : 0].ranks;
      return text_of(others.size() == 1 ? " Has " : " Have ", ranks_text(others), " called ", forward,
                     " without a gradient (no_grad(), detach(), requires_grad=False)? Where one rank takes the backward"
                     " pass of a call, all have to.");
    }
  // A few ranks against many: they have taken a branch. The optimizer's own calls are in no branch.
  const auto is_odder = [](const Standing& a, const Standing& b) {
    if (is_of_optimizer(a) != is_of_optimizer(b)) return is_of_optimizer(b);
    return a.ranks.size() < b.ranks.size();
  };
  const Standing& odd = *std::min_element(groups.begin(), groups.end(), is_odder);
  std::string text;
  if (odd.ranks.size() == 1)
    text += text_of(" Is the call ", odd.where.empty() ? "" : "at " + odd.where + " ",
                    "inside `if hvd.rank() == ", odd.ranks[0], "`?");
  for (const Standing& group : groups)
    if (is_of_optimizer(group) && !is_of_optimizer(odd)) {
      text += text_of(group.ranks.size() == 1 ? " Has " : " Have ", ranks_text(group.ranks), " more batches than ",
                      ranks_text(odd.ranks), "? (hvd.join() evens them out.)");
      break;
    }
  const auto is_elsewhere = [&](const Standing& g) { return g.call->world != groups[0].call->world; };
  if (std::any_of(groups.begin(), groups.end(), is_elsewhere)) text += text_of(" ", kBetweenWorlds);
  return text + " Every rank has to make the same calls in the same order.";
}

}  // namespace

uint64_t key_of_call(uint16_t process_set, const Request& request) {
  const bool unnamed = request.name.empty();
  uint64_t key = unnamed ? request.sequence : hash_of_text(request.name);
  mix(&key, process_set);
  mix(&key, static_cast<uint64_t>(request.signature.op) * 2 + unnamed);
  return key;
}

uint64_t id_of_set(uint64_t world, uint16_t process_set) {
  if (world == 0) return process_set;
  uint64_t id = world;
  mix(&id, process_set);
  return id;
}

void add_world(const WaitingRank& in_world, uint64_t world, std::span<const int> rank_of, WaitingRank* to) {
  const auto place = [&](int rank) { return rank_of[static_cast<size_t>(rank)]; };
  const auto mixed = [&](uint64_t key) {
    mix(&key, world);
    return key;
  };
  for (AwaitedCall call : in_world.awaited) {
    call.world = world;
    call.key = mixed(call.key);
    if (call.peer >= 0) call.peer = place(call.peer);
    for (int& member : call.members) member = place(member);
    to->awaited.push_back(std::move(call));
  }
  for (const uint64_t key : in_world.submitted) to->submitted.push_back(mixed(key));
  std::sort(to->submitted.begin(), to->submitted.end());
  for (const uint64_t set : in_world.joined) to->joined.push_back(id_of_set(world, static_cast<uint16_t>(set)));
  to->polls = to->polls || in_world.polls;
}

bool is_between_worlds(const WaitingRanks& ranks, const std::set<int>& stuck) {
  std::set<uint64_t> worlds;
  for (const int rank : stuck)
    for (const AwaitedCall& call : ranks.at(rank).awaited) worlds.insert(call.world);
  if (worlds.size() < 2) return false;
  const MembersOf nobody = [](uint16_t) { return std::span<const int>(); };
  return std::none_of(worlds.begin(), worlds.end(), [&](uint64_t world) {
    WaitingRanks of_one;
    for (const auto& [rank, waiting] : ranks) {
      WaitingRank part = waiting;
      std::erase_if(part.awaited, [&](const AwaitedCall& call) { return call.world != world; });
      if (!part.awaited.empty()) of_one[rank] = std::move(part);
    }
    return !find_deadlock(of_one, nobody).empty();
  });
}

std::set<int> find_deadlock(const WaitingRanks& ranks, const MembersOf& members_of) {
  std::map<uint64_t, Missing> of_key;  // what many ranks wait for is looked at once
  std::map<int, std::vector<Missing>> waits;
  for (const auto& [rank, waiting] : ranks) {
    std::vector<Missing> all;
    for (const AwaitedCall& call : waiting.awaited) {
      if (is_message(call.op)) {
        all.push_back(missing_in(call, rank, ranks, members_of));
      } else {
        const auto [at, is_new] = of_key.try_emplace(call.key);
        if (is_new) at->second = missing_in(call, rank, ranks, members_of);
        all.push_back(at->second);
      }
      if (all.back().is_open) break;
    }
    if (!all.empty() && !all.back().is_open) waits[rank] = std::move(all);
  }
  std::set<int> stuck;
  for (const auto& [rank, all] : waits) stuck.insert(rank);
  const auto may_end = [&](const Missing& m) {
    const auto goes_on = [&](int rank) { return !stuck.contains(rank); };
    return m.any ? std::any_of(m.ranks.begin(), m.ranks.end(), goes_on)
                 : std::all_of(m.ranks.begin(), m.ranks.end(), goes_on);
  };
  for (bool changed = true; changed;) {
    changed = false;
    for (const auto& [rank, all] : waits)
      if (stuck.contains(rank) && std::any_of(all.begin(), all.end(), may_end)) {
        stuck.erase(rank);
        changed = true;
      }
  }
  return stuck;
}

std::string describe_deadlock(const WaitingRanks& ranks, const std::set<int>& stuck, const MembersOf& members_of) {
  const std::vector<Standing> groups = groups_of(ranks, stuck);
  std::string text;
  size_t shown = 0;
  for (const Standing& group : groups) {
    if (++shown > kShownGroups) break;
    text += text.empty() ? "" : ", ";
    text += text_of(ranks_text(group.ranks),
                    shown > 1                 ? ""
                    : group.ranks.size() == 1 ? " stands"
                                              : " stand",
                    " in ", group.call->text);
    if (group.call->world != groups[0].call->world) {
      text += text_of(" of another process group of ", ranks_text(group.call->members));
    } else if (group.call->process_set != 0) {
      const std::span<const int> members = members_in(*group.call, members_of);
      text += text_of(" of the process set of ", ranks_text({members.begin(), members.end()}));
    }
    if (!group.where.empty()) text += text_of(" at ", group.where);
  }
  if (groups.size() > kShownGroups) text += text_of(" and others at ", groups.size() - kShownGroups, " more places");
  if (groups.size() == 1 && groups[0].ranks.size() == 1) return text + ", which only it could answer.";
  return text + ": each waits for a call that the other has not made, so none can go on." + likely_reason(groups);
}

void encode(const WaitingRank& rank, Writer* out) {
  const auto put_ranks = [&](const std::vector<int>& ranks) {
    out->put(static_cast<uint32_t>(ranks.size()));
    for (int each : ranks) out->put(static_cast<int32_t>(each));
  };
  out->put(rank.quiet_s);
  out->put(rank.version);
  out->put(rank.polls);
  out->put(rank.has_looked);
  out->put_text(rank.where);
  out->put(static_cast<uint32_t>(rank.awaited.size()));
  for (const AwaitedCall& call : rank.awaited) {
    out->put(call.op);
    out->put(call.process_set);
    out->put(call.key);
    out->put(call.peer);
    out->put_text(call.text);
    out->put(call.world);
    put_ranks(call.members);
  }
  out->put(static_cast<uint32_t>(rank.submitted.size()));
  for (uint64_t key : rank.submitted) out->put(key);
  out->put(static_cast<uint32_t>(rank.joined.size()));
  for (uint64_t set : rank.joined) out->put(set);
}

Status decode(Reader* in, WaitingRank* rank) {
  const auto count = [&] {
    const auto n = in->get<uint32_t>();
    if (n > kMaxCalls) in->fail();
    return in->ok() ? n : 0;
  };
  rank->quiet_s = in->get<double>();
  rank->version = in->get<uint64_t>();
  rank->polls = in->get<bool>();
  rank->has_looked = in->get<bool>();
  rank->where = in->get_text();
  for (uint32_t n = count(); n > 0 && in->ok(); --n) {
    AwaitedCall& call = rank->awaited.emplace_back();
    const auto op = in->get<uint8_t>();
    if (op >= kOpCount) in->fail();
    call.op = static_cast<Op>(op);
    call.process_set = in->get<uint16_t>();
    call.key = in->get<uint64_t>();
    call.peer = in->get<int32_t>();
    call.text = in->get_text();
    call.world = in->get<uint64_t>();
    for (uint32_t m = count(); m > 0 && in->ok(); --m) call.members.push_back(in->get<int32_t>());
  }
  for (uint32_t n = count(); n > 0 && in->ok(); --n) rank->submitted.push_back(in->get<uint64_t>());
  for (uint32_t n = count(); n > 0 && in->ok(); --n) rank->joined.push_back(in->get<uint64_t>());
  return in->ok() ? Status::ok() : error(Code::kInternal, "a frame about what a rank waits for is broken");
}

std::string ranks_text(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size();) {
    size_t end = i;
    while (end + 1 < ranks.size() && ranks[end + 1] == ranks[end] + 1) ++end;
    text += text_of(i ? "," : "", ranks[i]);
    if (end > i) text += text_of(end == i + 1 ? "," : "-", ranks[end]);
    i = end + 1;
  }
  return text;
}

}  // namespace hc
