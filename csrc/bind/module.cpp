// tensorizer._C: a list of what each binding file registers.
#include <pybind11/pybind11.h>

#include "bind/bindings.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled half of tensorizer. Private: signatures may change between any two releases.";
  tensorizer::bind::register_errors(m);
  tensorizer::bind::register_io(m);
  tensorizer::bind::register_file(m);
  tensorizer::bind::register_crypto(m);
  tensorizer::bind::register_cuda(m);  // copy engines, which loads and saves take
  tensorizer::bind::register_load(m);
  tensorizer::bind::register_save(m);
  tensorizer::bind::register_http(m);
  tensorizer::bind::register_redis(m);
}
