// The Python side of memory.h.
#include "memory.h"

#include <pybind11/stl.h>

#include <cstdint>
#include <vector>

#include "horoclone_tools.h"
#include "without_gil.h"

namespace py = pybind11;

namespace hc_python {

void add_memory(py::module_& m) {
  py::class_<Block>(m, "Block", py::buffer_protocol())
      .def_buffer(&Block::buffer)
      .def_property_readonly("data_ptr", [](const Block& b) { return reinterpret_cast<uintptr_t>(b.data()); })
      .def_property_readonly("nbytes", &Block::bytes);
  py::class_<DeviceBlock>(m, "DeviceBlock")
      .def_property_readonly("data_ptr", &DeviceBlock::data)
      .def_property_readonly("nbytes", &DeviceBlock::bytes)
      .def_property_readonly("__cuda_array_interface__", &DeviceBlock::interface);
  py::class_<Result>(m, "Result", py::buffer_protocol())
      .def_buffer(&Result::buffer)
      .def_property_readonly("data_ptr", [](const Result& r) { return reinterpret_cast<uintptr_t>(r.data()); })
      .def_property_readonly("nbytes", &Result::bytes)
      .def_readonly("first_dimension", &Result::first_dimension)
      .def_readonly("join_rank", &Result::join_rank)
      .def_readonly("rows_from", &Result::rows_from)
      .def_readonly("dtype", &Result::dtype)
      .def_readonly("shape", &Result::shape)
      .def_readonly("source", &Result::source)
      .def_readonly("device", &Result::device);
  m.def(
      "hash_memory",
      [](const std::vector<uintptr_t>& addresses, const std::vector<int64_t>& bytes) {
        std::vector<const void*> data;
        for (const uintptr_t address : addresses) data.push_back(reinterpret_cast<const void*>(address));
        if (bytes.size() != data.size()) throw py::value_error("hash_memory: a size for each address");
        std::vector<uint64_t> hashes(data.size());
        {
          WithoutGil released;
          hc_hash_memory(data.data(), bytes.data(), static_cast<int32_t>(data.size()), hashes.data());
        }
        return hashes;
      },
      py::arg("addresses"), py::arg("nbytes"));
}

}  // namespace hc_python
