// How the VM refuses a program or a step: std::invalid_argument with what is wrong. Not inside a step.
#pragma once

#include <stdexcept>
#include <string>
#include <type_traits>

namespace headrace {

template <typename... Parts>
[[noreturn]] inline void fail(const Parts&... parts) {
  std::string message;
  const auto append = [&](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) message += std::to_string(part);
    else message += part;
  };
  (append(parts), ...);
  throw std::invalid_argument(message);
}

}  // namespace headrace
