# What every target of the project shares: language level, warnings, sanitizers, include root.
#
#   sluice_library(NAME SOURCES ... [PUBLIC ...] [PRIVATE ...] [SHARED])
#   sluice_test(NAME SOURCES ... LIBS ...)        one GoogleTest binary, registered with CTest

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

find_program(SLUICE_CCACHE ccache)
if(SLUICE_CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${SLUICE_CCACHE}")
  set(CMAKE_C_COMPILER_LAUNCHER "${SLUICE_CCACHE}")
endif()

add_library(sluice_options INTERFACE)
target_include_directories(sluice_options INTERFACE "${CMAKE_SOURCE_DIR}")
target_compile_options(sluice_options INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-Wconversion;-Wshadow;-Wnon-virtual-dtor;-Werror>)
if(SLUICE_SANITIZE)
  string(REPLACE ";" "," sluice_sanitizers "${SLUICE_SANITIZE}")
  add_compile_options(-fsanitize=${sluice_sanitizers} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${sluice_sanitizers})
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

function(sluice_test name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LIBS" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE sluice_options ${ARG_LIBS} GTest::gtest GTest::gmock
                                        GTest::gtest_main)
  gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 300)
endfunction()
