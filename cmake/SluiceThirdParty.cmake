# The libraries of others, as the project's targets name them. With SLUICE_SELF_CONTAINED, as a wheel has it, they are part of what
# is built: programs and libraries that do not link torch then need of the system only the C library.
#
#   sluice_fmt, sluice_spdlog, sluice_yaml, sluice_zlib, sluice_openssl
#
# protobuf (sluice_protobuf) is always linked in, and its names stay within: torch brings parts of another one.
#
# Of prometheus-cpp (PrometheusCore::core) most systems have no archive: then its library is installed beside what is built, and
# needs the system's C++ library.
#
#   sluice_self_contained(TARGET...)   takes in the C++ library as well, where it is to; not for what links torch, which has its own

option(SLUICE_SELF_CONTAINED "Link in all but the C library" OFF)

if(SLUICE_SELF_CONTAINED)
  set(OPENSSL_USE_STATIC_LIBS ON)
endif()
find_package(OpenSSL 3.0 REQUIRED)
add_library(sluice_openssl INTERFACE)
target_link_libraries(sluice_openssl INTERFACE OpenSSL::SSL)

add_library(sluice_fmt INTERFACE)
add_library(sluice_yaml INTERFACE)
add_library(sluice_zlib INTERFACE)
if(SLUICE_SELF_CONTAINED)
  find_library(SLUICE_YAML_ARCHIVE libyaml-cpp.a REQUIRED)
  find_library(SLUICE_ZLIB_ARCHIVE libz.a REQUIRED)
  target_include_directories(sluice_zlib SYSTEM INTERFACE "${ZLIB_INCLUDE_DIRS}")
  target_link_libraries(sluice_zlib INTERFACE "${SLUICE_ZLIB_ARCHIVE}")
  target_link_libraries(sluice_fmt INTERFACE fmt::fmt-header-only)
  # Its own target would link the shared fmt.
  get_target_property(sluice_spdlog_headers spdlog::spdlog INTERFACE_INCLUDE_DIRECTORIES)
  add_library(sluice_spdlog STATIC "${CMAKE_SOURCE_DIR}/runtime/telemetry/spdlog_library.cpp")
  target_include_directories(sluice_spdlog SYSTEM PUBLIC ${sluice_spdlog_headers})
  target_compile_definitions(sluice_spdlog PUBLIC SPDLOG_COMPILED_LIB SPDLOG_FMT_EXTERNAL)
  target_link_libraries(sluice_spdlog PUBLIC sluice_fmt Threads::Threads)
  foreach(target IN ITEMS yaml-cpp yaml-cpp::yaml-cpp)  # before 0.8, and since
    if(TARGET ${target})
      get_target_property(sluice_yaml_headers ${target} INTERFACE_INCLUDE_DIRECTORIES)
      if(sluice_yaml_headers)
        target_include_directories(sluice_yaml SYSTEM INTERFACE ${sluice_yaml_headers})
      endif()
    endif()
  endforeach()
  target_link_libraries(sluice_yaml INTERFACE "${SLUICE_YAML_ARCHIVE}")
else()
  target_link_libraries(sluice_fmt INTERFACE fmt::fmt)
  add_library(sluice_spdlog INTERFACE)
  target_link_libraries(sluice_spdlog INTERFACE spdlog::spdlog)
  target_link_libraries(sluice_yaml INTERFACE yaml-cpp)
  target_link_libraries(sluice_zlib INTERFACE ZLIB::ZLIB)
endif()

add_library(sluice_protobuf INTERFACE)
target_link_libraries(sluice_protobuf INTERFACE protobuf::libprotobuf)
# With what our own files instantiate of its templates.
target_link_options(sluice_protobuf INTERFACE "-Wl,--exclude-libs,libprotobuf.a:libsluice_model_config_proto.a:libsluice_repository.a")

# sluice_grpc, where there is gRPC: its archives, with what they need of the above.
find_package(GrpcServer)
if(TARGET GrpcServer::grpc)
  add_library(sluice_grpc INTERFACE)
  target_link_libraries(sluice_grpc INTERFACE GrpcServer::grpc sluice_protobuf sluice_openssl sluice_zlib Threads::Threads)
endif()

# protoc's code of `schema`.proto, a path from the root. It is not ours to warn of, and nothing of it nor of the library leaves the
# program: torch has a protobuf of its own.
function(sluice_proto_library name schema)
  set(generated "${CMAKE_CURRENT_BINARY_DIR}/generated")
  add_custom_command(
    OUTPUT "${generated}/${schema}.pb.cc" "${generated}/${schema}.pb.h"
    COMMAND "${CMAKE_COMMAND}" -E make_directory "${generated}"
    COMMAND protobuf::protoc "--proto_path=${CMAKE_SOURCE_DIR}" "--cpp_out=${generated}" "${CMAKE_SOURCE_DIR}/${schema}.proto"
    DEPENDS "${CMAKE_SOURCE_DIR}/${schema}.proto" protobuf::protoc
    VERBATIM)
  add_library(${name} STATIC "${generated}/${schema}.pb.cc")
  set_target_properties(${name} PROPERTIES UNITY_BUILD OFF)
  target_include_directories(${name} SYSTEM PUBLIC "${generated}")
  target_link_libraries(${name} PUBLIC sluice_protobuf ${ARGN})
endfunction()

function(sluice_self_contained)
  if(SLUICE_SELF_CONTAINED AND NOT SLUICE_SANITIZE)
    foreach(target IN LISTS ARGV)
      target_link_options(${target} PRIVATE -static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL)
    endforeach()
  endif()
endfunction()
