# What every target of the project shares: language level, warnings, sanitizers, include root.
#
#   sluice_library(NAME SOURCES ... [PUBLIC ...] [PRIVATE ...] [SHARED])
#   sluice_test(NAME SOURCES ... LIBS ... [SINGLE_THREADED] [OWN_HEADERS] [WHOLE])   one GoogleTest binary, registered with CTest

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
set(CMAKE_LIBRARY_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib")
set(CMAKE_ARCHIVE_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/lib")

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 12)
  message(FATAL_ERROR "g++ is ${CMAKE_CXX_COMPILER_VERSION}, but Sluice needs 12 or newer")
endif()

find_program(SLUICE_CCACHE ccache)
if(SLUICE_CCACHE)
  # Base folder and no hash of the working folder: another clone, or another preset with the same
  # options, takes what this one compiled. The sloppiness is what ccache demands before it caches
  # uses of a precompiled header.
  set(sluice_launcher "${CMAKE_COMMAND}" -E env
    "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_NOHASHDIR=1
    "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime"
    "${SLUICE_CCACHE}")
  set(CMAKE_CXX_COMPILER_LAUNCHER "${sluice_launcher}")
  set(CMAKE_C_COMPILER_LAUNCHER "${sluice_launcher}")
endif()

add_library(sluice_options INTERFACE)
target_include_directories(sluice_options INTERFACE "${CMAKE_SOURCE_DIR}")
target_compile_options(sluice_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wconversion;-Wshadow;-Wnon-virtual-dtor;-Werror>
  # clang takes a name for hidden that another of the files has which CMake puts together, and knows no sized delete unasked.
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:Clang>>:-Wno-shadow;-fsized-deallocation>
  # g++ 13 sees a write out of bounds in the moves of std::vector, which is not there.
  $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-array-bounds;-Wno-stringop-overflow>)
if(SLUICE_SANITIZE)
  string(REPLACE ";" "," sluice_sanitizers "${SLUICE_SANITIZE}")
  # Instrumented, the standard library's own code looks as if it read what nobody has written.
  target_compile_options(sluice_options INTERFACE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-maybe-uninitialized>)
  # Asio has fences, which ThreadSanitizer does not see; what it says because of them would be a failed test.
  target_compile_options(sluice_options INTERFACE $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CXX_COMPILER_ID:GNU>>:-Wno-tsan>)
  add_compile_options(-fsanitize=${sluice_sanitizers} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  if("undefined" IN_LIST SLUICE_SANITIZE)
    # These look at every access through a pointer and double the time of a build. What they find faults under
    # AddressSanitizer, which comes along, or harms nobody on x86-64.
    add_compile_options(-fno-sanitize=null,alignment,object-size,vptr)
    add_compile_options($<$<CXX_COMPILER_ID:Clang>:-fno-sanitize=function>)
  endif()
  add_link_options(-fsanitize=${sluice_sanitizers})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    # One runtime for programs and the libraries that they open, and told to the sources, as g++ has it.
    execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -print-resource-dir
                    OUTPUT_VARIABLE sluice_clang_folder OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    add_link_options(-shared-libsan "-Wl,-rpath,${sluice_clang_folder}/lib/linux")
    add_compile_definitions(__SANITIZE_ADDRESS__)
  endif()
endif()

function(sluice_library name)
  cmake_parse_arguments(ARG "SHARED" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  if(ARG_SHARED)
    add_library(${name} SHARED ${ARG_SOURCES})
  else()
    add_library(${name} STATIC ${ARG_SOURCES})
  endif()
  target_link_libraries(${name} PUBLIC sluice_options ${ARG_PUBLIC} PRIVATE ${ARG_PRIVATE})
endfunction()

# What tests include before anything else, compiled once for all of them (an executable, as they are: an object library would be
# compiled for another kind of addresses).
function(sluice_precompile_for_tests)
  file(WRITE "${CMAKE_BINARY_DIR}/precompiled_for_tests.cpp" "int main() {}\n")
  add_executable(sluice_precompiled_for_tests EXCLUDE_FROM_ALL "${CMAKE_BINARY_DIR}/precompiled_for_tests.cpp")
  target_link_libraries(sluice_precompiled_for_tests PRIVATE sluice_options GTest::gtest GTest::gmock)
  target_compile_options(sluice_precompiled_for_tests PRIVATE ${sluice_test_options})
  target_precompile_headers(sluice_precompiled_for_tests PRIVATE
    <gmock/gmock.h> <gtest/gtest.h>
    <algorithm> <array> <atomic> <chrono> <cstdint> <cstdlib> <cstring> <filesystem> <fstream> <functional> <map> <memory> <mutex>
    <optional> <random> <set> <sstream> <stdexcept> <string> <thread> <utility> <vector>)
endfunction()

# What is tested is optimised and looked at; the tests themselves are quicker to compile without. The rest lets ccache see
# what the precompiled header was made of.
set(sluice_test_options -O0 -fno-sanitize=undefined
  $<$<CXX_COMPILER_ID:GNU>:-fpch-preprocess>
  "$<$<CXX_COMPILER_ID:Clang>:SHELL:-Xclang -fno-pch-timestamp>")

# Cases are listed when CTest starts, not when the binary is linked: a build then runs nothing, and
# a sanitizer finding is a failed test instead of a failed build.
# OWN_HEADERS: it has precompiled headers of its own, or none.
# WHOLE: CTest has one entry for all its cases, each of which takes less than to start it.
# SINGLE_THREADED: there is nothing in it for ThreadSanitizer, which leaves it out.
function(sluice_test name)
  cmake_parse_arguments(ARG "OWN_HEADERS;SINGLE_THREADED;WHOLE" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE sluice_options ${ARG_LIBS} GTest::gtest_main GTest::gtest GTest::gmock)
  target_compile_options(${name} PRIVATE ${sluice_test_options})
  if(NOT ARG_OWN_HEADERS)
    target_precompile_headers(${name} REUSE_FROM sluice_precompiled_for_tests)
  endif()
  if(ARG_SINGLE_THREADED AND SLUICE_SANITIZE STREQUAL "thread")
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  set_property(GLOBAL APPEND PROPERTY SLUICE_UNIT_TESTS ${name})
  if(ARG_WHOLE)
    add_test(NAME ${name} COMMAND ${name})
    set_tests_properties(${name} PROPERTIES TIMEOUT 900)
  else()
    gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 900)
  endif()
endfunction()
