#include "connect.h"

#include <pybind11/pybind11.h>

#include <memory>

#include "without_gil.h"

namespace hc_python {

namespace py = pybind11;

namespace {

struct Interrupt {
  // Called by hc_connect every 50 ms, without the GIL.
  static int32_t check(void* context) {
    py::gil_scoped_acquire gil;
    auto* self = static_cast<Interrupt*>(context);
    try {
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (!self->look.is_none()) self->look();
      return 0;
    } catch (py::error_already_set& raised) {
      self->error = std::make_unique<py::error_already_set>(std::move(raised));
      return 1;
    }
  }
  const py::object& look;
  std::unique_ptr<py::error_already_set> error;
};

}  // namespace

hc_status* connect_interruptibly(hc_runtime* rt, const Members& m) {
  std::vector<const uint8_t*> data;
  std::vector<size_t> bytes;
  for (const std::string& e : m.endpoints) {
    data.push_back(reinterpret_cast<const uint8_t*>(e.data()));
    bytes.push_back(e.size());
  }
  hc_mpi link{};
  if (m.mpi) {
    const auto& [library, communicator, byte_type, forced] = *m.mpi;
    link = {library.c_str(), static_cast<intptr_t>(communicator), static_cast<intptr_t>(byte_type), forced};
  }
  Interrupt interrupt{m.look, nullptr};
  hc_members members{};
  members.version = HC_VERSION;
  members.rank = m.rank;
  members.size = static_cast<int32_t>(m.endpoints.size());
  members.endpoints = data.data();
  members.endpoint_bytes = bytes.data();
  members.secret = reinterpret_cast<const uint8_t*>(m.secret.data());
  members.secret_bytes = m.secret.size();
  members.job = m.job.c_str();
  members.generation = m.generation;
  members.timeout_s = m.timeout_s;
  members.cancelled = &Interrupt::check;
  members.cancelled_context = &interrupt;
  members.mpi = m.mpi ? &link : nullptr;
  hc_status* status;
  {
    WithoutGil released;
    status = hc_connect(rt, &members);
  }
  if (!interrupt.error) return status;
  hc_status_destroy(status);
  throw std::move(*interrupt.error);
}

}  // namespace hc_python
