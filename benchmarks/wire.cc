// A long cable in user space, for kernels without netem: what one end of a pair of TUN devices is given leaves the
// other end at the rate of a line, a delay later, or never.
//
//   wire FD FD BITS_PER_S DELAY_US LOST_PER_MILLION QUEUE_US SEED
//
// Each direction has its own line: a packet is done when the one before it is and its bits have passed, and is there
// DELAY_US after that. What would wait longer than QUEUE_US for the line is dropped, as by a full router. Ends at the
// end of its standard input.
#include <poll.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <random>
#include <vector>

namespace {

using Ns = int64_t;

Ns now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Line {
  struct Packet {
    Ns due;
    std::vector<char> bytes;
  };
  int from, to;
  Ns free_at = 0;
  std::deque<Packet> under_way{};
  uint64_t lost = 0, dropped = 0, delivered = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 8) return 2;
  const int ends[2] = {std::atoi(argv[1]), std::atoi(argv[2])};
  const double ns_per_byte = 8e9 / std::atof(argv[3]);
  const Ns delay = std::atoll(argv[4]) * 1000, queue = std::atoll(argv[6]) * 1000;
  std::mt19937_64 random(std::strtoull(argv[7], nullptr, 10));
  std::bernoulli_distribution is_lost(std::atof(argv[5]) / 1e6);
  Line lines[2] = {{ends[0], ends[1]}, {ends[1], ends[0]}};
  std::vector<char> buffer(1 << 16);
  for (;;) {
    Ns next = now() + 1000000000;
    for (Line& line : lines) {
      for (; !line.under_way.empty() && line.under_way.front().due <= now(); line.under_way.pop_front()) {
        const std::vector<char>& bytes = line.under_way.front().bytes;
        if (write(line.to, bytes.data(), bytes.size()) > 0) ++line.delivered;
      }
      if (!line.under_way.empty()) next = std::min(next, line.under_way.front().due);
    }
    pollfd all[3] = {{ends[0], POLLIN, 0}, {ends[1], POLLIN, 0}, {0, POLLIN, 0}};
    const Ns rest = std::max<Ns>(0, next - now());
    const timespec limit{rest / 1000000000, rest % 1000000000};
    if (ppoll(all, 3, &limit, nullptr) < 0) return 1;
    if (all[2].revents) break;
    for (Line& line : lines) {
      for (int batch = 0; batch < 64; ++batch) {
        const ssize_t bytes = read(line.from, buffer.data(), buffer.size());
        if (bytes <= 0) break;
        const Ns at = now();
        if (line.free_at - at > queue) {
          ++line.dropped;
          continue;
        }
        line.free_at = std::max(line.free_at, at) + static_cast<Ns>(static_cast<double>(bytes) * ns_per_byte);
        if (is_lost(random)) {
          ++line.lost;
          continue;
        }
        line.under_way.push_back({line.free_at + delay, {buffer.data(), buffer.data() + bytes}});
      }
    }
  }
  for (const Line& line : lines)
    std::fprintf(stderr, "%llu delivered, %llu lost, %llu dropped\n", (unsigned long long)line.delivered,
                 (unsigned long long)line.lost, (unsigned long long)line.dropped);
  return 0;
}
