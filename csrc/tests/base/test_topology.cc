// The place of a process in a machine, read from folders in the form of /sys/devices/system.
#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>

#include "base/thread.h"
#include "base/topology.h"
#include "tests/made_up_machine.h"

using namespace hc;

TEST_CASE("topology: lists of CPUs as the kernel writes them") {
  CHECK(cpus_in_list("0") == std::vector<int>{0});
  CHECK(cpus_in_list("0-2,8,10-11") == std::vector<int>{0, 1, 2, 8, 10, 11});
  for (const char* wrong : {"", "x", "1-", "-1", "3-1", "1,,2", "0-99999999", "1 2"})
    CHECK(cpus_in_list(wrong).empty());
}

TEST_CASE("topology: a process belongs to what holds all of its CPUs") {
  const MadeUpMachine machine({.sockets = 2, .nodes = 2, .caches = 2, .cpus = 4});
  const std::string& folder = machine.folder();
  CHECK(locality_of_cpus(folder, std::vector<int>{0}) == Locality{0, 0, 0});
  CHECK(locality_of_cpus(folder, std::vector<int>{4, 5}) == Locality{0, 0, 4});
  CHECK(locality_of_cpus(folder, std::vector<int>{3, 4}) == Locality{0, 0, -1});
  CHECK(locality_of_cpus(folder, std::vector<int>{7, 8}) == Locality{0, -1, -1});
  CHECK(locality_of_cpus(folder, std::vector<int>{15, 16}) == Locality{-1, -1, -1});
  CHECK(locality_of_cpus(folder, std::vector<int>{31}) == Locality{1, 3, 28});
  CHECK(locality_of_cpus(folder, {}) == Locality{});
}

TEST_CASE("topology: what is not described is unknown") {
  const MadeUpMachine machine({.sockets = 1, .nodes = 1, .caches = 1, .cpus = 2});
  const std::string& folder = machine.folder();
  CHECK(locality_of_cpus(folder + "/none", std::vector<int>{0}) == Locality{});
  CHECK(locality_of_cpus(folder, std::vector<int>{77}) == Locality{});
  std::filesystem::remove_all(folder + "/node");
  std::filesystem::remove(folder + "/cpu/cpu0/cache/index1/level");
  CHECK(locality_of_cpus(folder, std::vector<int>{0}) == Locality{0, -1, -1});
  std::ofstream(folder + "/cpu/cpu0/topology/physical_package_id") << "-1\n";  // as some virtual machines say
  CHECK(locality_of_cpus(folder, std::vector<int>{0}) == Locality{});
}

TEST_CASE("topology: this machine can be read") {
  const Locality here = locality_of_cpus(kSystemFolder, std::vector<int>{allowed_cpus().at(0)});
  CHECK(here.socket >= -1);
}
