# Finds the Python whose torch Sluice is built against, and that torch's folder.
#
# Sets SLUICE_PYTHON (interpreter), SLUICE_TORCH_DIR (site-packages/torch, or empty without torch), SLUICE_TORCH_VERSION, and of
# that the first two numbers, SLUICE_TORCH_MINOR.
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

# Sets SLUICE_TORCH_DIR, _VERSION and _MINOR to those of an interpreter, or to nothing if it has no torch. SLUICE_PYTHON_FAILED: it
# could not be asked.
function(sluice_torch_of python)
  set(version "")
  set(minor "")
  execute_process(
    COMMAND "${python}" -c
      "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE folder OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed)
  if(folder)
    file(STRINGS "${folder}/version.py" version REGEX "^__version__")
    string(REGEX REPLACE ".*'([0-9.]+).*" "\\1" version "${version}")
    string(REGEX MATCH "^[0-9]+\\.[0-9]+" minor "${version}")
  endif()
  set(SLUICE_TORCH_DIR "${folder}" PARENT_SCOPE)
  set(SLUICE_TORCH_VERSION "${version}" PARENT_SCOPE)
  set(SLUICE_TORCH_MINOR "${minor}" PARENT_SCOPE)
  set(SLUICE_PYTHON_FAILED "${failed}" PARENT_SCOPE)
endfunction()

sluice_torch_of("${SLUICE_PYTHON}")

include(FindPackageHandleStandardArgs)
if(SLUICE_PYTHON_FAILED)
  set(SLUICE_PYTHON "SLUICE_PYTHON-NOTFOUND")
endif()
find_package_handle_standard_args(SluicePython REQUIRED_VARS SLUICE_PYTHON
  REASON_FAILURE_MESSAGE "run ./scripts/setup.sh, or name an interpreter with -DSLUICE_PYTHON")
