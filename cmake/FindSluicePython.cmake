# Finds the Python whose torch Sluice is built against, and that torch's folder.
#
# Sets SLUICE_PYTHON (interpreter), SLUICE_TORCH_DIR (site-packages/torch, or empty without torch) and
# SLUICE_TORCH_VERSION.
# Order: -DSLUICE_PYTHON, for a wheel the one that it is made with, what scripts/setup.sh chose, the checkout's .venv, then python3 on PATH.

set(sluice_chosen_python "${CMAKE_SOURCE_DIR}/.cache/python")
if(NOT SLUICE_PYTHON)
  if(SKBUILD)
    set(sluice_found_python "${Python_EXECUTABLE}")
  elseif(EXISTS "${sluice_chosen_python}")
    file(STRINGS "${sluice_chosen_python}" sluice_found_python LIMIT_COUNT 1)
  elseif(EXISTS "${CMAKE_SOURCE_DIR}/.venv/bin/python3")
    set(sluice_found_python "${CMAKE_SOURCE_DIR}/.venv/bin/python3")
  else()
    find_program(SLUICE_PYTHON_ON_PATH python3 REQUIRED)
    set(sluice_found_python "${SLUICE_PYTHON_ON_PATH}")
  endif()
  set(SLUICE_PYTHON "${sluice_found_python}" CACHE FILEPATH "Python interpreter whose torch is built against" FORCE)
endif()

execute_process(
  COMMAND "${SLUICE_PYTHON}" -c
    "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE SLUICE_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE sluice_python_failed)
if(SLUICE_TORCH_DIR)
  file(STRINGS "${SLUICE_TORCH_DIR}/version.py" SLUICE_TORCH_VERSION REGEX "^__version__")
  string(REGEX REPLACE ".*'([0-9.]+).*" "\\1" SLUICE_TORCH_VERSION "${SLUICE_TORCH_VERSION}")
endif()

# What was found beside another Python's torch must be looked for again.
if(NOT "${SLUICE_TORCH_DIR}" STREQUAL "${SLUICE_TORCH_DIR_SEARCHED}")
  foreach(found IN ITEMS TORCH_C10 TORCH_CPU TORCH_ALL TORCH_INCLUDE_DIR TORCH_CUDA TORCH_C10_CUDA
                TORCH_CUDA_INCLUDE_DIR CUDA_DRIVER_INCLUDE_DIR)
    unset(${found} CACHE)
  endforeach()
endif()
set(SLUICE_TORCH_DIR_SEARCHED "${SLUICE_TORCH_DIR}" CACHE INTERNAL "")

include(FindPackageHandleStandardArgs)
if(sluice_python_failed)
  set(SLUICE_PYTHON "SLUICE_PYTHON-NOTFOUND")
endif()
find_package_handle_standard_args(SluicePython REQUIRED_VARS SLUICE_PYTHON
  REASON_FAILURE_MESSAGE "run ./scripts/setup.sh, or name an interpreter with -DSLUICE_PYTHON")
