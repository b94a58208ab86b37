// The C++ tests' whole framework: check a condition, count the faults, go on.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>

namespace headrace::tests {

inline int& faults() {
  static int count = 0;
  return count;
}

inline void check(bool is_good, const std::string& what) {
  if (!is_good && ++faults() <= 20) std::printf("FAULT: %s\n", what.c_str());
}

// The call must throw std::invalid_argument whose message holds `words`.
template <class Fn>
void check_refused(Fn call, const std::string& words) {
  try {
    call();
  } catch (const std::invalid_argument& error) {
    return check(std::string(error.what()).find(words) != std::string::npos,
                 "refused with '" + std::string(error.what()) + "', expected '" + words + "'");
  }
  check(false, "not refused: " + words);
}

inline int report(const char* name) {
  std::printf("%s: %d faults\n", name, faults());
  return faults() == 0 ? 0 : 1;
}

}  // namespace headrace::tests
