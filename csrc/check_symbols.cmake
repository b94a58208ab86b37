# Fails when a file that is compiled for one instruction set defines a weak symbol that another file may define too: the
# linker keeps one copy, and a CPU without that instruction set would run it. Cure: make the function static, or a
# template over Isa.
string(REPLACE "|" ";" OBJECTS "${OBJECTS}")
foreach(object IN LISTS OBJECTS)
  if(NOT object MATCHES "isa_(avx[a-z0-9]+)\\.cpp")
    continue()
  endif()
  set(isa ${CMAKE_MATCH_1})
  execute_process(COMMAND ${NM} -C --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE ";" "," symbols "${symbols}")
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" weak "${symbols}")
  foreach(symbol IN LISTS weak)
    # nm leaves some names of nested lambdas as they are mangled.
    if(NOT symbol MATCHES "headrace::${isa}::" AND NOT symbol MATCHES "_Z[^ ]*[0-9]${isa}3Isa")
      message(FATAL_ERROR "isa_${isa}.cpp defines a symbol that other files share: ${symbol}")
    endif()
  endforeach()
endforeach()
