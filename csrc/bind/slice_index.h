// An index, as in tensor[...]: a box of the tensor and the shape of the result.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <vector>

#include "load/slice_plan.h"

namespace tensorizer::bind {

struct SliceIndex {
  std::vector<load::SliceDim> box;     // one for each dimension of the tensor
  std::vector<uint64_t> result_shape;  // without the dimensions that integers took
};

// An integer, a slice, ..., None, or a tuple of these, as torch reads them. Throws IndexError,
// ValueError and TypeError with torch's words; TypeError for other indices. REQUIRES: the
// interpreter lock.
SliceIndex parse_slice_index(pybind11::handle index, std::span<const uint64_t> shape);

}  // namespace tensorizer::bind
