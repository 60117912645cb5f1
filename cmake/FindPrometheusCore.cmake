# Finds the core of prometheus-cpp, which writes metrics as Prometheus reads them, without its own CMake package: that one asks for the
# libraries of its HTTP server and of its client, too, neither of which is used.
#
# Defines the target PrometheusCore::core, of the archive if there is one. Of a shared library PROMETHEUS_CORE_SONAME is the name
# under which programs look for it.

find_path(PROMETHEUS_CORE_INCLUDE_DIR prometheus/text_serializer.h NO_CACHE)
find_library(PROMETHEUS_CORE_LIBRARY NAMES libprometheus-cpp-core.a prometheus-cpp-core NO_CACHE)

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(PrometheusCore
  REQUIRED_VARS PROMETHEUS_CORE_LIBRARY PROMETHEUS_CORE_INCLUDE_DIR
  REASON_FAILURE_MESSAGE "prometheus-cpp is missing: run ./scripts/setup.sh, install prometheus-cpp-dev, or name the folder that it is installed in with -DCMAKE_PREFIX_PATH")

set(PROMETHEUS_CORE_SONAME "")
if(PrometheusCore_FOUND AND NOT PROMETHEUS_CORE_LIBRARY MATCHES "\\.a$")
  execute_process(COMMAND "${CMAKE_READELF}" -d "${PROMETHEUS_CORE_LIBRARY}"
                  OUTPUT_VARIABLE sluice_dynamic COMMAND_ERROR_IS_FATAL ANY)
  if(sluice_dynamic MATCHES "SONAME[^\n]*\\[([^]\n]+)\\]")
    set(PROMETHEUS_CORE_SONAME "${CMAKE_MATCH_1}")
  endif()
endif()
if(PrometheusCore_FOUND AND NOT TARGET PrometheusCore::core)
  add_library(PrometheusCore::core INTERFACE IMPORTED)
  target_include_directories(PrometheusCore::core SYSTEM INTERFACE "${PROMETHEUS_CORE_INCLUDE_DIR}")
  target_link_libraries(PrometheusCore::core INTERFACE "${PROMETHEUS_CORE_LIBRARY}")
endif()
