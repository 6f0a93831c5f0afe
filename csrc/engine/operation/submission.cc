#include "engine/operation/submission.h"

#include "base/hash.h"

namespace hc {

size_t bytes_of(const Submission::Tensor& t) {
  size_t bytes = size_of(t.dtype);
  for (int64_t d : t.shape) bytes *= static_cast<size_t>(d);
  return bytes;
}

size_t BucketSet::Bucket::bytes() const { return bytes_of(Submission::Tensor{data, data, shape, dtype}); }

Submission BucketSet::submission_of(int process_set, int index, const DeclaredCall& call,
                                    Submission::Tensor* tensor) const {
  const Bucket& bucket = buckets[static_cast<size_t>(index)];
  *tensor = {bucket.data, bucket.data, bucket.shape, bucket.dtype};
  Submission s;
  s.reduce = reduce;
  s.process_set = process_set;
  s.name = bucket.name;
  s.prescale = prescale;
  s.postscale = postscale;
  s.tensors = {tensor, 1};
  s.place = place;
  s.stream = call.stream;
  s.priority = call.priority;
  return s;
}

uint64_t BucketSet::fingerprint() const {
  std::string text;
  for (const Bucket& b : buckets) {
    text += text_of(b.name, name_of(b.dtype));
    for (int64_t d : b.shape) text += text_of(",", d);
  }
  text += text_of(";", static_cast<int>(reduce), ",", prescale, ",", postscale, place.is_host ? "" : ",gpu");
  return hash_of_text(text);
}

}  // namespace hc
