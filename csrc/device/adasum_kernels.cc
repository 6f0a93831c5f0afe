// Launches of Adasum's kernels: as many rows at a time as a kernel's arguments hold.
#include <algorithm>

#include "device/gpu_kernels.h"

namespace hc {

Status GpuKernels::adasum_rows(const char* kernel, DType work, CuPointer sums, std::span<const AdasumRow> rows,
                               CuStream stream) {
  const std::string name = text_of(kernel, work == DType::kF64 ? "f64" : "f32");
  for (size_t done = 0; done < rows.size();) {
    const size_t some = std::min<size_t>(rows.size() - done, kMaxAdasumRows);
    AdasumArguments arguments;
    arguments.sums = sums;
    std::copy_n(rows.begin() + static_cast<ptrdiff_t>(done), some, arguments.row);
    HC_TRY(launch(name, &arguments, {1, static_cast<unsigned>(some)}, stream));
    done += some;
  }
  return Status::ok();
}

Status GpuKernels::adasum_fold(const Fold& fold, std::span<const AdasumSum> sums, CuStream stream) {
  for (size_t done = 0; done < sums.size();) {
    const size_t some = std::min<size_t>(sums.size() - done, kMaxAdasumSums);
    AdasumFoldArguments arguments;
    arguments.from = fold.from;
    arguments.to = fold.to + done * 3 * fold.lanes_out * sizeof(double);
    arguments.lanes_in = fold.lanes_in;
    arguments.lanes_out = fold.lanes_out;
    std::copy_n(sums.begin() + static_cast<ptrdiff_t>(done), some, arguments.sum);
    const unsigned blocks = (3 * fold.lanes_out + kThreadsPerBlock - 1) / kThreadsPerBlock;
    HC_TRY(launch("hc_adasum_fold", &arguments, {blocks, static_cast<unsigned>(some)}, stream));
    done += some;
  }
  return Status::ok();
}

}  // namespace hc
