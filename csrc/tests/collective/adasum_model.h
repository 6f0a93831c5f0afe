// Adasum's float64 model and cases of it: random tensors of every float dtype, and how far a result is from the model.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "base/dtype.h"
#include "tests/elements.h"

namespace hc {

using Vector = std::vector<double>;

inline double dot(const Vector& a, const Vector& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}
inline Vector adasum(const Vector& a, const Vector& b) {
  const double aa = dot(a, a), ab = dot(a, b), bb = dot(b, b);
  const double of_a = aa == 0 ? 1 : 1 - ab / (2 * aa), of_b = bb == 0 ? 1 : 1 - ab / (2 * bb);
  Vector sum(a.size());
  for (size_t i = 0; i < a.size(); ++i) sum[i] = of_a * a[i] + of_b * b[i];
  return sum;
}
inline Vector model(std::vector<Vector> vectors) {
  const size_t extra = vectors.size() - std::bit_floor(vectors.size());
  std::vector<Vector> next;
  for (size_t i = 0; i < 2 * extra; i += 2) next.push_back(adasum(vectors[i], vectors[i + 1]));
  next.insert(next.end(), vectors.begin() + static_cast<long>(2 * extra), vectors.end());
  while (next.size() > 1) {
    std::vector<Vector> level;
    for (size_t i = 0; i < next.size(); i += 2) level.push_back(adasum(next[i], next[i + 1]));
    next = level;
  }
  return next[0];
}

inline std::vector<std::byte> packed(const Vector& values, DType dtype) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) store(dtype, bytes.data() + i * size_of(dtype), values[i]);
  return bytes;
}
inline Vector unpacked(const std::vector<std::byte>& bytes, DType dtype) {
  Vector values(bytes.size() / size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) values[i] = load(dtype, bytes.data() + i * size_of(dtype));
  return values;
}

inline double tolerance(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 0x1p-10;
    case DType::kBF16:
      return 0x1p-7;
    case DType::kF32:
      return 1e-6;
    case DType::kF64:
    case DType::kBool:
    case DType::kU8:
    case DType::kI8:
    case DType::kU16:
    case DType::kI16:
    case DType::kI32:
    case DType::kI64:
      break;
  }
  return 1e-13;
}

// Tensors of one group: rank r's values of tensor t, as the dtype holds them.
struct AdasumCase {
  int size;
  DType dtype;
  std::vector<size_t> counts;
  double pre = 1, post = 1;
  std::vector<std::string> nodes = {};  // not empty: of the averages of each node's ranks; equal names in a row

  std::vector<std::byte> input(int rank, size_t tensor) const {
    std::mt19937 random(static_cast<unsigned>(rank * 1000 + static_cast<int>(tensor)));
    std::normal_distribution<double> normal(0.2 * static_cast<double>(tensor), 1);
    Vector values(counts[tensor]);
    for (double& v : values) v = tensor == 2 && rank % 2 ? 0 : normal(random);
    return packed(values, dtype);
  }
  // The largest difference from the model, relative to the tensor's largest element.
  double difference(size_t tensor, const std::vector<std::byte>& result) const {
    std::vector<Vector> all;
    for (int r = 0; r < size; ++r) {
      Vector mine = unpacked(input(r, tensor), dtype);
      const auto at = static_cast<size_t>(r);
      const auto ranks = nodes.empty() ? 1 : std::count(nodes.begin(), nodes.end(), nodes[at]);
      for (double& v : mine) v *= pre / static_cast<double>(ranks);
      if (nodes.empty() || r == 0 || nodes[at] != nodes[at - 1])
        all.push_back(mine);
      else
        for (size_t i = 0; i < mine.size(); ++i) all.back()[i] += mine[i];
    }
    const Vector expected = model(all), got = unpacked(result, dtype);
    double largest = 1e-30, worst = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      largest = std::max(largest, std::abs(expected[i] * post));
      worst = std::max(worst, std::abs(expected[i] * post - got[i]));
    }
    return worst / largest;
  }
};

}  // namespace hc
