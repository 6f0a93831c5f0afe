#include "device/gpu_kernels.h"

#include <algorithm>
#include <bit>

#include "device/gpu.h"

namespace hc {

namespace {

constexpr size_t kMaxCount = 1u << 30;       // elements of one piece of a launch
constexpr size_t kBytesPerThread = 64;       // below it, fewer blocks. Not measured on a GPU.
constexpr unsigned kBlocksPerProcessor = 8;  // as many as run at once; the rest in strides
// A launch has a row of blocks for each of its pieces, the same number in all: from here on a piece is cut into
// several.
constexpr size_t kRowBytes = 256u << 10;
// From here on a plain copy is the driver's, which knows how each GPU copies fastest. Not measured on a GPU.
constexpr size_t kCopyFromBytes = 1u << 20;

// As kernels.cu calls it: f16 for DType::kF16.
std::string short_name(DType dtype) {
#define HC_SHORT(name, enumerator, ...) #enumerator,
  constexpr const char* names[] = {HC_REDUCED_DTYPES(HC_SHORT)};
#undef HC_SHORT
  std::string name = names[static_cast<int>(dtype)] + 1;
  for (char& c : name)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return name;
}

std::string reduction_name(DType dtype) { return text_of("hc_reduce_", short_name(dtype)); }

std::string packing_name(bool packs, const Packing& how) {
  return (packs ? "hc_pack_" : "hc_unpack_") +
         (how.is_copy() ? "bytes" : text_of(short_name(how.tensor), "_", short_name(how.packed)));
}

unsigned blocks_for(size_t bytes, unsigned most) {
  const size_t per_block = kBytesPerThread * kThreadsPerBlock;
  return static_cast<unsigned>(std::clamp<size_t>((bytes + per_block - 1) / per_block, 1, most));
}

Result<CuModule> loaded(const Gpu& gpu, const KernelImage& image) {
  const Gpu::Current current(gpu);
  CuModule module = nullptr;
  HC_TRY(gpu.api().check(gpu.api().cuModuleLoadData(&module, image.code.c_str()), "cuModuleLoadData"), image.origin);
  return module;
}

}  // namespace

Result<std::unique_ptr<GpuKernels>> GpuKernels::load(Gpu* gpu, const KernelOptions& options) {
  if (options.off) return error(Code::kUnsupported, "HOROCLONE_GPU_KERNELS is off");
  const GpuPlatform& platform = gpu->api().platform;
  auto architecture = gpu->api().architecture(gpu->device());
  HC_TRY(architecture.status());
  std::string before;
  KernelImage image = built_in_kernels();
  if (!image.code.empty() && !platform.is_hip) {
    auto module = loaded(*gpu, image);
    if (module.is_ok()) return made_of(gpu, module.value(), image);
    before = module.status().text() + "; ";  // an older driver, or a GPU that nobody knew then
  }
  auto compiled = compiled_kernels(options, architecture.value(), platform);
  HC_TRY(compiled.status(), before, "the kernels");
  image = compiled.take();
  auto module = loaded(*gpu, image);
  HC_TRY(module.status(), before, "the kernels");
  return made_of(gpu, module.value(), image);
}

Result<std::unique_ptr<GpuKernels>> GpuKernels::made_of(Gpu* gpu, CuModule module, const KernelImage& image) {
  std::unique_ptr<GpuKernels> kernels(new GpuKernels(gpu, module, image.origin));
  int processors = 0;
  HC_TRY(gpu->api().check(gpu->api().cuDeviceGetAttribute(&processors, gpu->api().attributes.processors, gpu->device()),
                          "cuDeviceGetAttribute"));
  kernels->most_blocks_ = kBlocksPerProcessor * static_cast<unsigned>(std::max(processors, 1));
  kernels->look_up_all();
  return kernels;
}

// CUDA loads a kernel when it is looked up, unless CUDA_MODULE_LOADING is EAGER, and may wait for all that runs on the
// GPU then: for a collective, that is, which waits for another rank. So it is done before there is one.
void GpuKernels::look_up_all() {
  const Gpu::Current current(gpu_);
  const auto look_up = [&](const std::string& name) {
    CuFunction function = nullptr;
    if (gpu_.api().cuModuleGetFunction(&function, module_, name.c_str()) == kCuSuccess) functions_[name] = function;
  };
  for (const bool packs : {true, false}) look_up(packing_name(packs, {}));
  for (int i = 0; i < kReducedDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    look_up(reduction_name(dtype));
    for (const bool packs : {true, false})  // of types that are never packed so there is no kernel
      for (const DType packed : {dtype, DType::kF32, DType::kI32}) look_up(packing_name(packs, {dtype, packed, 2, 1}));
  }
  for (const char* kernel : {"hc_adasum_products_", "hc_adasum_combine_"})
    for (const char* work : {"f32", "f64"}) look_up(text_of(kernel, work));
  look_up("hc_adasum_fold");
}

GpuKernels::~GpuKernels() {
  const Gpu::Current current(gpu_);
  (void)gpu_.api().cuModuleUnload(module_);
}

Status GpuKernels::move(bool packs, const Packing& how, CuPointer packed, std::span<const PackedPiece> pieces,
                        CuStream stream) {
  const Gpu::Current current(gpu_, Gpu::Current::For::kStreams);
  const size_t item = size_of(how.tensor);
  const std::string name = packing_name(packs, how);
  PackArguments arguments;
  arguments.packed = packed;
  arguments.factor = how.factor;
  arguments.divisor = how.divisor;
  unsigned rows = 0;
  size_t longest = 0;
  size_t bytes = 0;
  for (const PackedPiece& piece : pieces) bytes += piece.count * item;
  // Few rows of a large whole, so that it stays one launch.
  const size_t row = std::min(std::bit_ceil(std::max(kRowBytes, 2 * bytes / kMaxPieces)) / item, kMaxCount / item);
  const auto flush = [&]() -> Status {
    if (!rows) return Status::ok();
    HC_TRY(launch(name, &arguments, {blocks_for(longest, std::max(most_blocks_ / rows, 1u)), rows}, stream));
    rows = 0;
    longest = 0;
    return Status::ok();
  };
  for (const PackedPiece& piece : pieces) {
    if (how.is_copy() && piece.count * item >= kCopyFromBytes) {
      const CuPointer place = packed + piece.place;
      HC_TRY(gpu_.copy(packs ? place : piece.tensor, packs ? piece.tensor : place, piece.count * item, stream));
      continue;
    }
    for (size_t done = 0; done < piece.count;) {
      const size_t count = std::min(piece.count - done, row);
      arguments.piece[rows++] = {piece.tensor + done * item,
                                 static_cast<unsigned>(how.is_copy() ? count * item : count),
                                 static_cast<unsigned>((piece.place + done * size_of(how.packed)) / kPlaceBytes)};
      longest = std::max(longest, count * item);
      done += count;
      if (rows == kMaxPieces) HC_TRY(flush());
    }
  }
  return flush();
}

Status GpuKernels::reduce(const Reduction& r, CuStream stream) {
  if (r.in.empty() || r.in.size() > kMaxPeers || r.out.size() > kMaxPeers)
    return error(Code::kInternal, "a reduction of ", r.in.size(), " inputs; at most ", kMaxPeers);
  if (!takes(reduced_as(r.op), r.dtype) || !is_element_wise(r.op))
    return error(Code::kInternal, "no kernel for ", name_of(r.op), " of ", name_of(r.dtype));
  if (!r.count) return Status::ok();
  const bool scaled = r.dtype != DType::kBool && (r.pre != 1 || r.post != 1);
  ReduceArguments arguments;
  std::copy(r.in.begin(), r.in.end(), arguments.in);
  std::copy(r.out.begin(), r.out.end(), arguments.out);
  arguments.count = r.count;
  arguments.pre = r.pre;
  arguments.post = r.post;
  arguments.divisor = r.dtype == DType::kBool ? 1 : r.divisor;
  arguments.sources = static_cast<int>(r.in.size());
  arguments.destinations = static_cast<int>(r.out.size());
  arguments.reduce = reduced_as(r.op);
  arguments.scaled = scaled;
  return launch(reduction_name(r.dtype), &arguments, {blocks_for(r.count * size_of(r.dtype), most_blocks_), 1}, stream);
}

Status GpuKernels::launch(const std::string& name, void* arguments, const Grid& grid, CuStream stream) {
  const CudaApi& cuda = gpu_.api();
  const Gpu::Current current(gpu_);
  CuFunction function = nullptr;
  if (const auto known = functions_.find(name); known != functions_.end())
    function = known->second;
  else
    HC_TRY(cuda.check(cuda.cuModuleGetFunction(&function, module_, name.c_str()), "cuModuleGetFunction"), name);
  void* parameters[] = {arguments};
  return cuda
      .check(cuda.cuLaunchKernel(function, grid.blocks, grid.rows, 1, kThreadsPerBlock, 1, 1, 0, stream, parameters,
                                 nullptr),
             "cuLaunchKernel")
      .with(name);
}

}  // namespace hc
