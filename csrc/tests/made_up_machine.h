// A folder in the form of /sys/devices/system that describes a machine which is not here.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "base/topology.h"

namespace hc {

struct MachineShape {
  int sockets = 1;
  int nodes = 1;   // in a socket
  int caches = 1;  // in a node
  int cpus = 1;    // that share a cache
  int cpus_of_node() const { return caches * cpus; }
  int cpus_of_socket() const { return nodes * cpus_of_node(); }
  int all_cpus() const { return sockets * cpus_of_socket(); }
  Locality place_of(int cpu) const { return {cpu / cpus_of_socket(), cpu / cpus_of_node(), cpu / cpus * cpus}; }
};

class MadeUpMachine {
 public:
  explicit MadeUpMachine(const MachineShape& shape) {
    static int made = 0;
    folder_ = (std::filesystem::temp_directory_path() /
               ("horoclone-machine-" + std::to_string(getpid()) + "-" + std::to_string(made++)))
                  .string();
    for (int cpu = 0; cpu < shape.all_cpus(); ++cpu) {
      const std::string at = "/cpu/cpu" + std::to_string(cpu);
      write(at + "/topology/physical_package_id", std::to_string(cpu / shape.cpus_of_socket()));
      write(at + "/topology/package_cpus_list", around(cpu, shape.cpus_of_socket()));
      write(at + "/cache/index0/level", "1");
      write(at + "/cache/index0/shared_cpu_list", std::to_string(cpu));
      write(at + "/cache/index1/level", "3");
      write(at + "/cache/index1/shared_cpu_list", around(cpu, shape.cpus));
    }
    for (int node = 0; node < shape.sockets * shape.nodes; ++node)
      write("/node/node" + std::to_string(node) + "/cpulist",
            around(node * shape.cpus_of_node(), shape.cpus_of_node()));
    write("/node/online", "0");
  }
  ~MadeUpMachine() { std::filesystem::remove_all(folder_); }
  MadeUpMachine(const MadeUpMachine&) = delete;
  MadeUpMachine& operator=(const MadeUpMachine&) = delete;
  const std::string& folder() const { return folder_; }

 private:
  static std::string around(int cpu, int width) {
    const int first = cpu / width * width;
    return std::to_string(first) + "-" + std::to_string(first + width - 1);
  }
  void write(const std::string& name, const std::string& text) const {
    const std::filesystem::path path = folder_ + name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }
  std::string folder_;
};

}  // namespace hc
