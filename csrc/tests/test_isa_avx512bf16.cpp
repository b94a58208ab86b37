// The avx512bf16 vocabulary against scalar.h. Compiled with that instruction set's flags.
#include "isa/avx512.h"
#include "probe.h"
#include "tests/isa_agrees.h"

int main() {
  if (headrace::find_kernels("avx512bf16") == nullptr) {
    std::printf("avx512bf16: this CPU does not have it\n");
    return 0;
  }
  return headrace::tests::Agreement<headrace::avx512bf16::Isa, false>().run() == 0 ? 0 : 1;
}
