# The parts that need libtorch, for the torch of SLUICE_PYTHON, and for that of each interpreter in SLUICE_MORE_PYTHONS.

find_package(TorchLibs REQUIRED)
add_subdirectory(runtime/torch)
add_library(sluice::step ALIAS sluice_torch_step)

block()  # what is set in it is of other versions than the first
  set(built_for "${SLUICE_TORCH_MINOR}")
  foreach(python IN LISTS SLUICE_MORE_PYTHONS)
    sluice_torch_of("${python}")
    if(NOT SLUICE_TORCH_DIR)
      message(FATAL_ERROR "${python}, of SLUICE_MORE_PYTHONS, has no torch")
    endif()
    if(SLUICE_TORCH_MINOR IN_LIST built_for)
      message(FATAL_ERROR "torch ${SLUICE_TORCH_MINOR}, of ${python}, is built for already")
    endif()
    set(SLUICE_TORCH_TAG "-${SLUICE_TORCH_MINOR}")
    find_package(TorchLibs REQUIRED)
    add_subdirectory(runtime/torch "torch-${SLUICE_TORCH_MINOR}")
    list(APPEND built_for "${SLUICE_TORCH_MINOR}")
  endforeach()
endblock()
