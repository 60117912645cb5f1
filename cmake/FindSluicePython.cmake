# Finds the Python whose torch Sluice is built against, and that torch's folder.
#
# Sets SLUICE_PYTHON (interpreter) and SLUICE_TORCH_DIR (site-packages/torch, or empty without torch).
# Order: -DSLUICE_PYTHON, the checkout's .venv, then python3 on PATH.

if(NOT SLUICE_PYTHON)
  if(EXISTS "${CMAKE_SOURCE_DIR}/.venv/bin/python3")
    set(SLUICE_PYTHON "${CMAKE_SOURCE_DIR}/.venv/bin/python3" CACHE FILEPATH "" FORCE)
  else()
    find_program(SLUICE_PYTHON_ON_PATH python3 REQUIRED)
    set(SLUICE_PYTHON "${SLUICE_PYTHON_ON_PATH}" CACHE FILEPATH "" FORCE)
  endif()
endif()

execute_process(
  COMMAND "${SLUICE_PYTHON}" -c
    "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
  OUTPUT_VARIABLE SLUICE_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE sluice_python_failed)

include(FindPackageHandleStandardArgs)
if(sluice_python_failed)
  set(SLUICE_PYTHON "SLUICE_PYTHON-NOTFOUND")
endif()
find_package_handle_standard_args(SluicePython REQUIRED_VARS SLUICE_PYTHON)
