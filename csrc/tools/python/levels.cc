// What `horoclone sockets` and tests ask about the levels of a machine.
#include "levels.h"

#include <pybind11/stl.h>

#include <array>
#include <string>
#include <vector>

#include "horoclone_tools.h"

namespace py = pybind11;

namespace hc_python {
namespace {

using Triple = std::array<int32_t, 3>;

Triple locality(const std::vector<int32_t>& cpus, const std::string& folder) {
  Triple place{};
  hc_locality(folder.empty() ? nullptr : folder.c_str(), cpus.data(), static_cast<int32_t>(cpus.size()), place.data());
  return place;
}

std::string levels_report(const std::vector<Triple>& places, int64_t bytes) {
  std::vector<int32_t> numbers;
  for (const Triple& place : places) numbers.insert(numbers.end(), place.begin(), place.end());
  return hc_levels_report(numbers.data(), static_cast<int32_t>(places.size()), bytes);
}

}  // namespace

void add_levels(py::module_& m) {
  using namespace py::literals;
  m.def("locality", &locality, "cpus"_a, "folder"_a = "");
  m.def("levels_report", &levels_report, "places"_a, "bytes"_a);
}

}  // namespace hc_python
