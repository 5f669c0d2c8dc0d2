// The build includes this ahead of every file of this folder. pybind11 shares its tables between
// the modules of a process that look alike; this one may be of another compiler, with another C++
// library, and meets torch through Python's objects alone.
#pragma once

#undef PYBIND11_COMPILER_TYPE  // older releases of torch set it on the command line
#define PYBIND11_COMPILER_TYPE "_tensorizer"
