// PS-Lite's side of benchmarks/parameter_server.py: one scheduler, server or worker (DMLC_ROLE), rows of 64 float32.
// Pull and push of 4,096 sorted keys out of 100,000; a server adds what is pushed, as its default handle does.
#include <ps/ps.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <random>
#include <set>
#include <unordered_map>
#include <vector>

namespace {

constexpr size_t kWidth = 64;

struct Rows {
  void operator()(const ps::KVMeta& meta, const ps::KVPairs<float>& data, ps::KVServer<float>* server) {
    ps::KVPairs<float> answer;
    if (!meta.push) answer.keys = data.keys, answer.vals.resize(data.keys.size() * kWidth);
    for (size_t i = 0; i < data.keys.size(); ++i) {
      auto& row = rows[data.keys[i]];
      if (meta.push) {
        for (size_t k = 0; k < kWidth; ++k) row[k] += data.vals[i * kWidth + k];
      } else {
        std::copy(row.begin(), row.end(), answer.vals.data() + i * kWidth);
      }
    }
    server->Response(meta, answer);
  }
  std::unordered_map<ps::Key, std::array<float, kWidth>> rows;
};

void work(size_t batch, size_t table, int steps) {
  ps::KVWorker<float> worker(0, 0);
  std::mt19937_64 random(ps::MyRank());
  const ps::Key apart = ps::kMaxKey / table;  // keys lie on servers by range
  std::vector<double> times;
  for (int step = 0; step < steps; ++step) {
    std::set<ps::Key> some;
    while (some.size() < batch) some.insert(random() % table * apart);
    const std::vector<ps::Key> keys(some.begin(), some.end());
    const std::vector<float> gradients(batch * kWidth, 1.0f);
    ps::SArray<float> values(batch * kWidth);
    const auto start = std::chrono::steady_clock::now();
    worker.Wait(worker.ZPull(ps::SArray<ps::Key>(keys), &values));
    worker.Wait(worker.Push(keys, gradients));
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  std::printf("median %.6f\n", times[times.size() / 2]);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  ps::StartAsync(0);
  ps::KVServer<float>* server = nullptr;
  if (ps::IsServer()) {
    server = new ps::KVServer<float>(0);
    server->set_request_handle(Rows());
    ps::RegisterExitCallback([server] { delete server; });
  }
  ps::Postoffice::Get()->Barrier(0, ps::kWorkerGroup + ps::kServerGroup + ps::kScheduler);
  if (ps::IsWorker()) work(std::stoul(argv[1]), std::stoul(argv[2]), std::stoi(argv[3]));
  ps::Finalize(0, true);
  return argc > 0 ? 0 : 1;
}
