// Runs one simulated agreement from Python: takes numbers by name, returns a JSON text. Releases the GIL meanwhile.
#include "simulate.h"

#include <pybind11/stl.h>

#include <array>
#include <map>
#include <string>

#include "horoclone_tools.h"
#include "python/without_gil.h"

namespace py = pybind11;

namespace hc_python {
namespace {

std::string simulate(const std::map<std::string, int>& numbers, const std::array<double, 3>& local,
                     const std::array<double, 3>& network) {
  hc_simulation s{};
  s.version = HC_VERSION;
  s.ranks = numbers.at("ranks");
  s.ranks_per_node = numbers.at("ranks_per_node");
  s.fanout = numbers.at("fanout");
  s.tensors = numbers.at("tensors");
  s.steps = numbers.at("steps");
  s.processing = numbers.at("processing");
  for (size_t i = 0; i < 3; ++i) {
    s.local[i] = local[i];
    s.network[i] = network[i];
  }
  const char* json = "";
  hc_status* status = nullptr;
  {
    WithoutGil released;
    status = hc_simulate(&s, &json);
  }
  if (!status) return json;
  const std::string text = hc_status_text(status);
  hc_status_destroy(status);
  throw py::value_error(text);
}

}  // namespace

void add_simulate(py::module_& m) {
  using namespace py::literals;
  m.def("simulate", &simulate, "numbers"_a, "local"_a, "network"_a);
}

}  // namespace hc_python
