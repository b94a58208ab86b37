// The avx2 vocabulary against scalar.h. Compiled with that instruction set's flags.
#include "isa/avx2.h"
#include "probe.h"
#include "tests/isa_agrees.h"

int main() {
  if (headrace::find_kernels("avx2") == nullptr) {
    std::printf("avx2: this CPU does not have it\n");
    return 0;
  }
  return headrace::tests::Agreement<headrace::avx2::Isa, true>().run() == 0 ? 0 : 1;
}
