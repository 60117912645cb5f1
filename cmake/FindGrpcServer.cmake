# Finds gRPC's C++ library with what it is made of, without its own CMake package: that one names shared libraries, and the archives of
# what they need are not in it.
#
# Defines the target GrpcServer::grpc, of the archives and of OpenSSL, which is to be found before. Not found, with a reason: then the server is built without gRPC.
# Order matters nowhere: the archives need each other, and are looked through again.

find_path(GRPC_INCLUDE_DIR grpcpp/generic/async_generic_service.h NO_CACHE)
set(sluice_grpc_archives)
foreach(part IN ITEMS grpc++ grpc gpr address_sorting upb re2 cares)
  find_library(GRPC_ARCHIVE_${part} NAMES lib${part}.a NO_CACHE)
  list(APPEND sluice_grpc_archives GRPC_ARCHIVE_${part})
endforeach()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(GrpcServer
  REQUIRED_VARS GRPC_INCLUDE_DIR ${sluice_grpc_archives}
  REASON_FAILURE_MESSAGE "sluice-server is built without gRPC: run ./scripts/setup.sh, install libgrpc++-dev, or name the folder that it is installed in with -DCMAKE_PREFIX_PATH")

if(GrpcServer_FOUND AND NOT TARGET GrpcServer::grpc)
  set(sluice_grpc_libraries)
  foreach(archive IN LISTS sluice_grpc_archives)
    list(APPEND sluice_grpc_libraries "${${archive}}")
  endforeach()
  get_filename_component(sluice_grpc_folder "${GRPC_ARCHIVE_grpc}" DIRECTORY)
  file(GLOB sluice_absl_archives "${sluice_grpc_folder}/libabsl_*.a")  # the linker takes of them what is used
  list(APPEND sluice_grpc_libraries ${sluice_absl_archives} ${OPENSSL_SSL_LIBRARY} ${OPENSSL_CRYPTO_LIBRARY})
  add_library(GrpcServer::grpc INTERFACE IMPORTED)
  target_include_directories(GrpcServer::grpc SYSTEM INTERFACE "${GRPC_INCLUDE_DIR}")
  target_link_libraries(GrpcServer::grpc INTERFACE "$<LINK_GROUP:RESCAN,${sluice_grpc_libraries}>" ${CMAKE_DL_LIBS})
endif()
