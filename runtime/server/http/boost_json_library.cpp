// Boost.JSON's own sources, which it has in headers: compiled here, once.
#include <boost/json/src.hpp>
